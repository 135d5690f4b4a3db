"""Databricks' two variables choose among the pools that the settings name for them, at each call."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.notebook import Notebook

pytestmark = pytest.mark.slow

POOLS = """\
reserved = "ours"
remote = "demand"
[pools.ours]
kind = "local"
[pools.demand]
kind = "local"
ranks = 2
[pools.third]
kind = "local"
id = "pool-17"
[pools.away]
kind = "command"
id = "pool-away"
hosts = "nowhere"
start = "false {host} {python}"
fallback = "demand"
"""
DEFINE = """\
%distributed_compat databricks
import os
from serverless_gpu import distributed
from jupyter_distrib.kernel.session import session
@distributed(gpus=2, remote=True)
def work(): return 1
def pool(use=None, id=None):
    for name, value in (("DATABRICKS_USE_RESERVED_GPU_POOL", use), ("DATABRICKS_REMOTE_GPU_POOL_ID", id)):
        os.environ.pop(name, None)
        if value is not None: os.environ[name] = value
    work.distributed()
    return session.current().history[-1].pool
"""


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("settings") / "pools.toml"


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory, settings: Path) -> Iterator[Notebook]:
    settings.write_text(POOLS)
    with Notebook(tmp_path_factory.mktemp("notebook"), {"JUPYTER_DISTRIB_CONFIG": str(settings)}) as book:
        book.ok("%load_ext jupyter_distrib")
        book.ok(DEFINE)
        yield book


@pytest.mark.parametrize(
    ("arguments", "pool"),
    [
        ("", "ours"),
        ("use='True'", "ours"),
        ("use='False'", "demand"),
        ("use='false'", "demand"),
        ("id='pool-17'", "third"),
        ("id='third'", "third"),
        ("use='True', id='pool-17'", "third"),
        ("use='False', id='pool-17'", "demand"),
        ("use='', id=''", "ours"),
    ],
)
def test_the_variables_choose_the_pool_of_a_call(book: Notebook, settings: Path, arguments: str, pool: str) -> None:
    settings.write_text(POOLS)
    assert book.ok(f"pool({arguments})").result == repr(pool)


def test_what_the_settings_do_not_name_is_refused_by_its_variable(book: Notebook, settings: Path) -> None:
    settings.write_text(POOLS)
    assert (
        "DATABRICKS_REMOTE_GPU_POOL_ID is 'pool-18', and no pool has this id" in book.fails("pool(id='pool-18')").evalue
    )
    assert "DATABRICKS_USE_RESERVED_GPU_POOL must be True or False; it is 'maybe'" in book.fails("pool('maybe')").evalue
    settings.write_text(POOLS.partition("\n")[2])
    assert book.ok("pool()").result == "'demand'"
    assert "the settings name no reserved pool: add the line reserved" in book.fails("pool(use='True')").evalue
    settings.write_text('reserved = "nowhere"\n')
    assert "reserved = 'nowhere' is not known" in book.fails("pool()").evalue


def test_each_call_and_cell_that_falls_back_says_so(book: Notebook, settings: Path) -> None:
    settings.write_text(POOLS)
    for _ in range(2):
        fallen = book.ok("pool(id='pool-away')")
        assert fallen.result == "'demand'"
        assert "on the pool demand, since away refused:" in fallen.text
    for _ in range(2):
        assert "on the pool demand, since away refused:" in book.ok("%%distributed --pool away --ranks 2\nNone").text
