"""No pod runs on when nobody uses it, whoever is killed and whether the cluster answers or not. What runs is read from
the processes, not from what the cluster says."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_distrib.wire import messages as m
from tests.kubernetes.bed import IMAGE, Cluster
from tests.kubernetes.conftest import Open
from tests.notebook import Notebook
from tests.processes import agents, wait_until, wait_until_gone
from tests.settings_files import write_trusted

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

PROMISED_S = 90.0


@pytest.fixture
def book(cluster: Cluster, tmp_path: Path) -> Iterator[Notebook]:
    """A notebook with two ranks in a pod."""
    write_trusted(tmp_path, f'pool = "cluster"\n[pools.cluster]\nkind = "kubernetes"\nimage = "{IMAGE}"\ncpu = "8"\n')
    with Notebook(tmp_path) as one:
        one.ok("%load_ext jupyter_distrib")
        assert one.cell("%%distributed --ranks 2\nrank").result == "rank 0: 0\nrank 1: 1"
        assert len(cluster.get("pods")) == 1
        yield one


def coordinators() -> list[int]:
    return agents(Path(os.environ["JUPYTER_DISTRIB_RUNTIME_DIR"]), "kubernetes")


def guards() -> list[int]:
    """The processes that delete a Job when its coordinator has ended."""
    mark = os.environ["JUPYTER_DISTRIB_RUNTIME_DIR"].encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes()
        except OSError:
            continue
        if line.startswith(b"sh\0") and mark in line:
            found.append(int(path.parent.name))
    return found


def kill(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert not wait_until_gone(pids)


@pytest.mark.parametrize("killed", ["the kernel", "kernel and coordinator"])
def test_pods_go_whoever_is_killed(cluster: Cluster, book: Notebook, killed: str) -> None:
    kill(book.pid, *(coordinators() if "coordinator" in killed else []))
    assert wait_until(lambda: not cluster.processes(), 30)
    assert wait_until(cluster.is_empty, 5)


def test_pods_that_wait_for_a_node_go_with_the_coordinator(cluster: Cluster, client: Open) -> None:
    one = client(gpus_per_pod="3", idle="11")
    one.send(m.OpenWorkerGroup(group="large", size=9, gpus=True, wait_s=600.0))
    assert wait_until(lambda: len(cluster.connected()) == 2, 30), (
        cluster.connected(),
        [pod["status"] for pod in cluster.get("pods")],
    )
    assert len(cluster.get("pods")) == 3
    kill(*coordinators())
    assert wait_until(cluster.is_empty, 20)


@pytest.mark.timeout(300)  # pods wait a minute for their notebook before they end
def test_pods_end_by_themselves_when_all_are_killed_and_nothing_answers(
    cluster: Cluster, client: Open, book: Notebook
) -> None:
    [left] = cluster.names("jobs")
    shown = [path.read_bytes() for path in Path(os.environ["JUPYTER_DISTRIB_RUNTIME_DIR"]).glob("*.log")]
    shown += [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in (*coordinators(), *guards(), *cluster.processes())]
    assert len(shown) > 3
    assert b"s3cret" not in b"".join(shown), "no token is shown anywhere"
    with cluster.frozen():
        kill(book.pid, *coordinators(), *guards())
        assert wait_until(lambda: not cluster.processes(), PROMISED_S)
    assert left in cluster.names("jobs")
    one = client(cpu="8", idle="112")
    assert wait_until(lambda: left not in cluster.names("jobs"), 10), "the next coordinator deletes it"
    one.group(1)
    client(cpu="8", idle="113").group(1)
    assert len(cluster.names("jobs")) == 2, "and none that is in use"


def test_free_pods_go_when_nobody_has_used_them_for_the_idle_time(cluster: Cluster, client: Open) -> None:
    one = client(idle="2")
    assert one.run(one.group(2), "rank").values == {0: 0, 1: 1}
    assert wait_until(lambda: not cluster.processes(), PROMISED_S)
    assert wait_until(cluster.is_empty, 10)
    assert one.run(one.group(2), "rank").values == {0: 0, 1: 1}


def test_the_job_of_another_user_is_not_touched(cluster: Cluster, client: Open, book: Notebook) -> None:
    """One with our labels, which no record here names."""
    [left] = cluster.get("jobs")
    name = left["metadata"]["name"]
    others = {**left, "metadata": {"name": "jd-somebody-0000", "labels": left["metadata"]["labels"]}, "status": {}}
    cluster.create_job(others)
    with cluster.frozen():
        kill(book.pid, *coordinators(), *guards())
    client(cpu="8", idle="114").group(1)
    assert wait_until(lambda: name not in cluster.names("jobs"), 10)
    assert "jd-somebody-0000" in cluster.names("jobs")


def test_a_job_is_deleted_when_the_cluster_answers_again(cluster: Cluster, book: Notebook) -> None:
    with cluster.frozen():
        book.ok("%distributed_pool stop")
        kill(*coordinators())
        assert wait_until(guards, 10), "which try again"
    assert wait_until(cluster.is_empty, 60)
    assert wait_until(lambda: not guards(), 10)
