"""A stand-in cluster with a real kubectl for all tests of this folder."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from jupyter_distrib.pools.kubernetes.pool import KubernetesPool
from jupyter_distrib.testing import PoolClient
from tests.kubernetes.bed import IMAGE, Cluster, missing
from tests.processes import agents, wait_until, wait_until_gone

Open = Callable[..., PoolClient]


@pytest.fixture(autouse=True, scope="session")
def cluster_is_here() -> None:
    if reason := missing():
        pytest.skip(reason)


@pytest.fixture(scope="session")
def running_cluster(cluster_is_here: None) -> Iterator[Cluster]:
    one = Cluster()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in one.environment.items():
            patch.setenv(name, value)
        try:
            yield one
            end_coordinators()
        finally:
            one.close()


def end_coordinators() -> None:
    """End what still holds Jobs, and wait until they are deleted, while there is a cluster that can delete them."""
    folder = Path(os.environ["JUPYTER_DISTRIB_RUNTIME_DIR"])
    found = agents(folder)
    for pid in found:
        os.kill(pid, signal.SIGTERM)
    assert not wait_until_gone(found, 60)
    jobs = folder / "kubernetes-jobs"
    assert wait_until(lambda: not jobs.exists() or not any(jobs.iterdir()), 90), [
        (each.name, each.read_text()) for each in jobs.iterdir()
    ]


@pytest.fixture
def cluster(running_cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, empty before and after a test: pods that were given back would stay for ten seconds."""
    empty(running_cluster)
    yield running_cluster
    running_cluster.do("heal")
    empty(running_cluster)


def empty(cluster: Cluster) -> None:
    cluster.do("clear")
    assert wait_until(cluster.is_empty, 30), (cluster.names("jobs"), cluster.names("pods"))
    assert wait_until(lambda: not cluster.processes(), 30), [
        Path(f"/proc/{pid}/cmdline").read_bytes()[:200] for pid in cluster.processes()
    ]


def pool(**options: str) -> KubernetesPool:
    return KubernetesPool(**{"image": IMAGE, **options})


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Open]:
    """Opens clients of pools with these options."""
    with ExitStack() as stack:

        def opened(**options: Any) -> PoolClient:
            one = PoolClient(pool(**options))
            stack.callback(one.close)
            return one

        yield opened
