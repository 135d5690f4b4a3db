"""A cluster that is scaled to zero grows for a cell that may wait."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_distrib import testing
from jupyter_distrib.pools.ray.pool import RayPool
from jupyter_distrib.testing import pool_client
from jupyter_distrib.wire import messages as m
from tests.processes import wait_until
from tests.ray.conftest import ENVIRONMENT, HERE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PORT = 6379


def answers(host: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((host, PORT)) == 0


@pytest.fixture
def scaled_to_zero(tmp_path: Path) -> Iterator[str]:
    """The address of a head without CPUs."""
    if subprocess.run(("unshare", "-rpf", "--mount-proc", "true"), capture_output=True, check=False).returncode:
        pytest.skip("no process namespace can be made here")
    from ray.util import get_node_ip_address

    host = get_node_ip_address()
    if answers(host):
        pytest.skip(f"port {PORT} is taken")
    process = subprocess.Popen(
        (sys.executable, str(HERE / "autoscaler.py"), str(tmp_path / "config.json")),
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert wait_until(lambda: answers(host), 60)
        yield f"{host}:{PORT}"
    finally:
        process.kill()
        process.wait()


def test_ranks_of_more_than_one_node_are_had(scaled_to_zero: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six, though no node that can come has room for all of them."""
    monkeypatch.setattr(pool_client, "LIMIT_S", 200.0)
    client = testing.PoolClient(RayPool(address=scaled_to_zero, insecure=""))
    try:
        client.send(m.OpenWorkerGroup(group="grows", size=6, gpus=False, wait_s=180.0))
        while isinstance(
            opened := client.wait(m.WorkerGroupQueued, m.WorkerGroupOpened, m.WorkerGroupRefused), m.WorkerGroupQueued
        ):
            continue
        assert isinstance(opened, m.WorkerGroupOpened), opened
        outcome = client.run(opened, "int(__import__('os').environ['NODE_RANK'])")
        assert outcome.values == {0: 0, 1: 0, 2: 0, 3: 1, 4: 1, 5: 1}
        client.close_group(opened)
    finally:
        client.close()
