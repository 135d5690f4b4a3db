"""The contract suite, the crash table and cells that are started again, in one Spark application with two executors."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from jupyter_distrib import testing
from jupyter_distrib.pools.spark.pool import SparkPool
from jupyter_distrib.testing import pool_client
from tests.notebook import ROOT, Notebook
from tests.product import crash_cases, restart_cases
from tests.spark.conftest import APPLICATION, DRIVER, running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

START_S = 300.0
ON_ONE_NODE = ("gives_values_in_rank_order", "sets_torchruns_variables", "numbers_ranks_from_the_first")
"""What these say of local ranks is so if all ranks are on one node."""
CHECKS = sorted(testing.checks(detached=True), key=lambda check: check.__name__ != "attaches")
"""That of detached runs first: the record keeps the application, and the test that ends it would have to wait."""
GOOD = """\
%%distributed --strategy ddp
import torch, torch.distributed as dist
t = torch.ones(1)
dist.all_reduce(t)
int(t)"""


@pytest.fixture
def book(cells: Notebook) -> Notebook:
    """The shared notebook, with its ranks up: they keep the application, which ends with its last ranks."""
    assert cells.cell(GOOD, START_S).result == "ranks 0-3: 4"
    return cells


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give Spark and Ray a minute to start, and this process the variables of the kernel, with which it shares the
    coordinator."""
    monkeypatch.setattr(pool_client, "LIMIT_S", 240.0)
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    monkeypatch.setenv("PYTHONPATH", path)


@pytest.mark.parametrize(
    "check", [check for check in CHECKS if check.__name__ not in ON_ONE_NODE], ids=lambda check: check.__name__
)
def test_two_executors(check: testing.Check, book: Notebook, patience: None) -> None:
    check(lambda: SparkPool(**APPLICATION))
    assert len(running(DRIVER)) == 1, "the suite has started an application of its own"


@pytest.mark.parametrize(("where", "how"), [pytest.param(*case, id=" ".join(case)) for case in crash_cases.FEW])
def test_the_rank_at_fault_is_named_and_the_next_cell_is_good(book: Notebook, where: str, how: str) -> None:
    crash_cases.run(book, where, how, 3, line="%%distributed --strategy ddp")
    assert book.cell(GOOD, START_S).result == "ranks 0-3: 4"


@pytest.mark.parametrize("victim", restart_cases.VICTIMS)
def test_a_cell_that_loses_a_rank_or_a_node_is_started_again(book: Notebook, victim: str) -> None:
    restart_cases.check(book, victim)


@pytest.fixture(scope="module")
def one_node() -> Iterator[dict[str, str]]:
    """The options of a pool with one node, where driver and executor are one process, and which has ranks."""
    options = {"master": "local[2]", "cpus_per_rank": "0"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool_client, "LIMIT_S", 240.0)
        client = testing.PoolClient(SparkPool(**options))
        group = client.group(1)
        yield options
        client.close_group(group)
        client.close()


@pytest.mark.parametrize(
    "check", [check for check in CHECKS if check.__name__ in ON_ONE_NODE], ids=lambda check: check.__name__
)
def test_one_node(check: testing.Check, one_node: dict[str, str]) -> None:
    check(lambda: SparkPool(**one_node))
