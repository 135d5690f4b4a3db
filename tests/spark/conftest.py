"""Real Spark, in a network namespace of the tests' own (`.ci/spark` makes it), since Ray on Spark listens on all
addresses."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.notebook import Notebook
from tests.processes import wait_until

ADDRESS = "10.99.0.1"
PORT = 7077
APPLICATION = {
    "master": "local-cluster[2,2,2048]",
    "nodes": "2",
    "cpus_per_rank": "0",
    "idle": "100",
    "conf": '{"spark.hadoop.fs.s3a.secret.key": "hunter2"}',
}
"""The options of the pool whose application most tests share. Ranks take no CPUs of Ray's, so that several worker groups
have room in it. The record of a detached run keeps it for `idle` seconds."""
DRIVER = "jupyter_distrib.pools.spark.application"
"""In the command line of the driver of each application of ours."""

ON_LOOPBACK = {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
"""Variables of a kernel that trains in Spark on this machine. pyspark chooses the port of torch's store on Spark's address
alone, and torch listens on all addresses: it fails if the port is taken on another one, and most are on this one."""


@pytest.fixture(autouse=True, scope="session")
def spark_is_here() -> None:
    if importlib.util.find_spec("pyspark") is None or not os.environ.get("JUPYTER_DISTRIB_SPARK"):
        pytest.skip("there is no Spark here (sh .ci/spark brings one)")


@pytest.fixture(scope="session")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """A notebook whose default pool is the application: four ranks on two nodes."""
    folder = tmp_path_factory.mktemp("notebook")
    lines = [f"{name} = {value!r}" for name, value in APPLICATION.items()]
    file = folder / "pools.toml"
    file.write_text("\n".join(['pool = "cluster"', "[pools.cluster]", 'kind = "spark"', *lines, "ranks = 4", ""]))
    with Notebook(folder, env={"JUPYTER_DISTRIB_CONFIG": str(file)}) as one:
        one.ok("%load_ext jupyter_distrib")
        yield one


class StandaloneCluster:
    """A standalone master and two workers of two cores."""

    def __init__(self, folder: Path) -> None:
        import pyspark

        self._home, self._folder = Path(pyspark.__file__).parent, folder
        self._log = (folder / "spark.log").open("wb")
        self.url = f"spark://{ADDRESS}:{PORT}"
        self._processes = [self._run("master.Master", "--host", ADDRESS, "--port", str(PORT), "--webui-port", "0")]
        assert wait_until(lambda: b"I have been elected leader" in self._text() or self._listens(), 60), self._text()
        for number in range(2):
            work = ["--work-dir", str(folder / f"work-{number}"), "--webui-port", "0"]
            self._processes.append(self._run("worker.Worker", "--cores", "2", "--memory", "1g", *work, self.url))

    def _run(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        command = [str(self._home / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}", *words]
        env = {**os.environ, "SPARK_HOME": str(self._home), "SPARK_LOCAL_IP": ADDRESS, "PYSPARK_PYTHON": sys.executable}
        return subprocess.Popen(command, cwd=self._folder, env=env, stdout=self._log, stderr=self._log)

    def _text(self) -> bytes:
        return (self._folder / "spark.log").read_bytes()

    def _listens(self) -> bool:
        return f"{ADDRESS}:{PORT}" in subprocess.run(("ss", "-tln"), capture_output=True, text=True, check=False).stdout

    def close(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            process.wait(20)
        self._log.close()


@pytest.fixture(scope="module")
def standalone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneCluster]:
    one = StandaloneCluster(tmp_path_factory.mktemp("standalone"))
    yield one
    one.close()


def running(*words: str) -> list[int]:
    """The processes with one of these words in their command lines."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if _is_here(int(path.parent.name)) and any(word in line for word in words):
            found.append(int(path.parent.name))
    return found


def _is_here(pid: int) -> bool:
    """Whether a process is in the tests' own network namespace."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net") == os.readlink("/proc/self/ns/net")
    except OSError:
        return False


def wait_until_none(words: Sequence[str], timeout_s: float = 60.0) -> list[int]:
    """Wait until no process has one of these words in its command line; return those that are left."""
    wait_until(lambda: not running(*words), timeout_s)
    return running(*words)
