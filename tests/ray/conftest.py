"""Real Ray: one cluster of two nodes on loopback for all tests of this folder."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.notebook import Notebook
from tests.processes import wait_until
from tests.settings_files import write_trusted

HERE = Path(__file__).parent
INSTALL = "Ray is not installed here: pip install 'jupyter_distrib[ray]' (sh .ci/ray does it)"
CPUS = 4
ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "PYTHONPATH": "",
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S": "120",  # 30 is too little on a loaded machine
    "GRPC_ENABLE_FORK_SUPPORT": "0",  # else the head loses some processes that it starts for clients, see `_join`
}


@pytest.fixture(autouse=True, scope="session")
def ray_is_here() -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip(INSTALL)


class Cluster:
    """The cluster's process, and where it is reached."""

    def __init__(self, nodes: int = 2, port: int = 0, **env: str) -> None:
        with socket.socket() as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind(("127.0.0.2", port))
            port = self.client_port = free.getsockname()[1]
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "cluster.py"), str(port), str(CPUS), str(nodes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **ENVIRONMENT, **env},
            text=True,
        )
        self.address = self._line()

    @property
    def client_address(self) -> str:
        """When somebody listens there: Ray's own start does not wait for the side of Ray Client."""
        with socket.socket() as probe:
            assert wait_until(lambda: probe.connect_ex(("127.0.0.2", self.client_port)) == 0, 60)
        return f"ray://127.0.0.2:{self.client_port}"

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line, "the cluster did not start"
        return line

    def ask(self, what: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        assert self._line() == "done"

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(scope="session")
def cluster(ray_is_here: None, runtime: Path) -> Iterator[Cluster]:
    one = Cluster(XDG_CACHE_HOME=str(runtime / "cache"))  # what an earlier run has installed for its ranks is elsewhere
    yield one
    one.close()


def name_it(cluster: Cluster, folder: Path) -> None:
    """Make it the default pool of notebooks in this folder."""
    write_trusted(
        folder,
        f'pool = "lab"\n[pools.lab]\nkind = "ray"\naddress = "{cluster.address}"\ninsecure = true\nnodes = 2\nranks = 4\n',
    )


@pytest.fixture(scope="module")
def kernel(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """A notebook whose default pool is the cluster: four ranks on two nodes."""
    folder = tmp_path_factory.mktemp("notebook")
    name_it(cluster, folder)
    with Notebook(folder) as book:
        book.ok("%load_ext jupyter_distrib")
        assert book.cell("%%distributed\nrank;", timeout_s=150).status == "ok", "the first ranks need patience"
        yield book
