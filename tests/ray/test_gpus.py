"""Who asks a Ray cluster for GPUs gets GPUs or a sentence, never CPU ranks instead. The GPUs are none: Ray counts them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_distrib import testing
from jupyter_distrib.pools.ray.pool import RayPool
from jupyter_distrib.testing import pool_client
from jupyter_distrib.wire import messages as m
from tests.gpu_bed import GpuBed
from tests.gpu_bed.test_hosts import WHERE
from tests.notebook import Notebook
from tests.ray.conftest import Cluster
from tests.settings_files import write_trusted

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def two_gpus() -> Iterator[Cluster]:
    one = Cluster(nodes=1)
    yield one
    one.close()


def test_ranks_without_gpus_do_not_hide_those_of_the_cluster(two_gpus: Cluster, tmp_path: Path) -> None:
    """By a pool whose file says `ranks`, and by a cell."""
    write_trusted(
        tmp_path,
        f'pool = "lab"\n[pools.lab]\nkind = "ray"\naddress = "{two_gpus.address}"\ninsecure = true\nranks = 2\n',
    )
    with Notebook(tmp_path) as book:
        book.ok("%load_ext jupyter_distrib")
        assert book.cell("%%distributed\nrank", timeout_s=150).result == "rank 0: 0\nrank 1: 1"
        assert "--gpus 4, but the Ray cluster has room for 2" in book.fails("%%distributed --gpus 4\nrank").traceback
        book.ok("%%distributed --ranks 1\nrank")
        assert "--gpus 4, but the Ray cluster has room for 2" in book.fails("%%distributed --gpus 4\nrank").traceback


def test_gpus_that_are_to_come_are_waited_for(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an autoscaler brings them to a cluster that has none."""
    monkeypatch.setattr(pool_client, "LIMIT_S", 200.0)
    client = testing.PoolClient(RayPool(address=cluster.address, insecure=""))
    try:
        client.send(m.OpenWorkerGroup(group="grows", size=2, gpus=True, wait_s=180.0))
        queued = client.wait(m.WorkerGroupQueued, m.WorkerGroupOpened, m.WorkerGroupRefused)
        while isinstance(queued, m.WorkerGroupQueued) and "grow" not in queued.reason:
            queued = client.wait(m.WorkerGroupQueued, m.WorkerGroupOpened, m.WorkerGroupRefused)
        assert isinstance(queued, m.WorkerGroupQueued), queued
        assert queued.reason == "2 GPUs are asked for, and 0 of 0 are free in the Ray cluster. It has to grow."
        cluster.ask("add gpus")
        opened = client.wait(m.WorkerGroupOpened, m.WorkerGroupRefused)
        assert isinstance(opened, m.WorkerGroupOpened), opened
        assert (opened.gpus, len(opened.workers)) == (True, 2)
        client.close_group(opened)
    finally:
        client.close()
        cluster.ask("lose")


def test_a_cluster_without_gpus_is_asked_again_when_gpus_may_be_waited_for(cluster: Cluster, tmp_path: Path) -> None:
    with Notebook(tmp_path) as book:
        at = f"--pool ray --insecure --address {cluster.address}"
        book.ok("%load_ext jupyter_distrib")
        outcome = book.cell(f"%%distributed {at} --gpus 2\nrank", timeout_s=150)
        assert "no GPU here" in outcome.text
        said = book.fails(f"%%distributed {at} --gpus 2 --wait 1\nrank").traceback
        assert "0 of 0 are free" in said


HOLDS = """
import os, ray

@ray.remote(num_gpus=1)
class Holder:
    def gpus(self):
        return ray.get_runtime_context().get_accelerator_ids()["GPU"], os.environ.get("CUDA_VISIBLE_DEVICES")

ray.init({address!r}, logging_level="ERROR")
held = Holder.remote()
print(ray.get(held.gpus.remote()))
"""
NOSET = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"


def test_ranks_have_the_gpus_that_ray_has_given_also_where_it_sets_no_variable(tmp_path: Path) -> None:
    """The node has feigned GPUs; another program of the cluster's holds the first of them."""
    with GpuBed(count=2) as bed:
        cluster = Cluster(nodes=1, **{**bed.environment, NOSET: "1"})
        try:
            with Notebook(tmp_path, {NOSET: "1"}) as other, Notebook(tmp_path) as book:
                assert other.ok(HOLDS.format(address=cluster.address)).stdout.strip() == "(['0'], None)"
                book.ok("%load_ext jupyter_distrib")
                at = f"--pool ray --insecure --address {cluster.address}"
                outcome = book.cell(f"%%distributed {at} --gpus 1\n{WHERE}", timeout_s=150)
                assert outcome.result == "rank 0: ('1', 'cuda:0')", outcome.text
                assert list(bed.numbers().values()) == [[1]]
        finally:
            cluster.close()
