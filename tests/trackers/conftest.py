"""A real MLflow server, asked by its REST interface, so that the tests themselves import no tracker."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from tests.processes import wait_until

QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}


@dataclass
class Server:
    """A running MLflow server."""

    uri: str

    def get(self, path: str, **query: str) -> dict[str, Any]:
        return self._answer(urllib.request.Request(f"{self.uri}/api/2.0/mlflow/{path}?{urlencode(query)}"))

    def post(self, path: str, **content: Any) -> dict[str, Any]:
        request = urllib.request.Request(f"{self.uri}/api/2.0/mlflow/{path}", json.dumps(content).encode())
        request.add_header("Content-Type", "application/json")
        return self._answer(request)

    def _answer(self, request: urllib.request.Request) -> dict[str, Any]:
        with urllib.request.urlopen(request, timeout=20) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def runs(self, experiment: str, count: int = 1, *, going_on: int = 0) -> list[dict[str, Any]]:
        """All runs of an experiment, oldest first, when there are so many and all but some have ended."""
        runs: list[dict[str, Any]] = []

        def complete() -> bool:
            runs[:] = self._found(experiment)
            running = [run for run in runs if run["info"]["status"] == "RUNNING"]
            return len(runs) >= count and len(running) <= going_on

        wait_until(complete, 20)
        return sorted(runs, key=lambda run: run["info"]["start_time"])

    def _found(self, experiment: str) -> list[dict[str, Any]]:
        try:
            number = self.get("experiments/get-by-name", experiment_name=experiment)["experiment"]["experiment_id"]
        except urllib.error.HTTPError:
            return []  # the experiment is made with its first run
        found: list[dict[str, Any]] = self.post("runs/search", experiment_ids=[number]).get("runs", [])
        return found

    def history(self, run: dict[str, Any], metric: str) -> list[float]:
        answer = self.get("metrics/get-history", run_id=run["info"]["run_id"], metric_key=metric)
        return [point["value"] for point in answer.get("metrics", [])]


def named(entries: list[dict[str, Any]]) -> dict[str, Any]:
    return {entry["key"]: entry["value"] for entry in entries}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    pytest.importorskip("mlflow", reason="needs mlflow: sh .ci/trackers")
    folder, port = tmp_path_factory.mktemp("mlflow"), free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += [
        "--backend-store-uri",
        f"sqlite:///{folder}/mlflow.db",
        "--artifacts-destination",
        str(folder / "files"),
    ]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=folder, env={**os.environ, **QUIET}, stdout=log, stderr=log, start_new_session=True
        )
    try:
        _wait(f"http://127.0.0.1:{port}", process, folder / "log")
        yield Server(f"http://127.0.0.1:{port}")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(uri: str, process: subprocess.Popen[bytes], log: Path) -> None:
    def answers() -> bool:
        with suppress(urllib.error.URLError, OSError):
            urllib.request.urlopen(f"{uri}/health", timeout=5).close()
            return True
        return False

    assert wait_until(lambda: process.poll() is not None or answers(), 90), log.read_text()
    assert process.poll() is None, log.read_text()
