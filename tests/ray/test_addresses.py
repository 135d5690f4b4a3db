"""Which cluster a notebook gets: `auto` is what its kernel's environment and machine say, at the time it connects."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_distrib.pools.ray import cluster as joining
from tests.notebook import Notebook
from tests.ray.conftest import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CELL = "%%distributed --pool ray --insecure --ranks 1\nrank;"


@pytest.fixture(scope="module")
def other(cluster: Cluster) -> Iterator[Cluster]:
    one = Cluster(nodes=1)
    yield one
    one.close()


def joined(book: Notebook) -> str:
    """Where the coordinator is whose ranks have executed a cell without an address."""
    book.ok("%load_ext jupyter_distrib")
    assert book.cell(CELL, timeout_s=150).status == "ok"
    return book.ok("%distributed_status").result.partition(", Ray at ")[2].split(",")[0].split()[0]


def test_auto_is_the_cluster_that_runs_here(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if len(set(filter(None, map(joining._cluster_of, joining._command_lines((os.getuid(), 0)))))) > 1:
        pytest.skip("other Ray clusters run on this machine, too")
    with Notebook(tmp_path) as book:
        assert joined(book) == cluster.address


def test_each_kernel_has_the_cluster_of_its_own_environment(cluster: Cluster, other: Cluster, tmp_path: Path) -> None:
    """Also while the coordinator of a kernel with another `RAY_ADDRESS` is alive."""
    for one in (cluster, other):
        with Notebook(tmp_path, env={"RAY_ADDRESS": one.address}) as book:
            assert joined(book) == one.address


def test_of_several_clusters_none_is_chosen(
    cluster: Cluster, other: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with Notebook(tmp_path) as book:
        book.ok("%load_ext jupyter_distrib")
        said = book.fails(CELL).traceback
    assert "Ray clusters run on this machine: choose one with --address or RAY_ADDRESS; they are at" in said
    assert cluster.address in said
    assert other.address in said
    assert "\n" not in said.strip()
