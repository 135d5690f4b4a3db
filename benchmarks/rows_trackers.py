"""What a run costs that an experiment tracker records, and one whose tracker's server hangs. Needs `.venv-trackers`."""

from __future__ import annotations

import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import turns
from plan import Plan
from report import Figure, spread

LINE = "--ranks 2 --strategy ddp"
QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
START_S = 120.0


@contextmanager
def _server(*, aside: bool) -> Iterator[str]:
    """An MLflow server on this machine; its address. With `aside` it takes only what CPU time the ranks leave, as one
    on another machine takes none."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="jdb-") as folder:
        command = [
            sys.executable,
            "-m",
            "mlflow",
            "server",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--workers",
            "1",
        ]
        command += ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", folder]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(command, env={**os.environ, **QUIET}, start_new_session=True, **quiet)
        if aside:
            _make_nicest(process.pid)
        try:
            until_s = time.monotonic() + START_S
            while True:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                    break
                except OSError:
                    if time.monotonic() > until_s:
                        raise
                    time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _make_nicest(pid: int) -> None:
    """Let a process and what it starts wait for all others.

    Source: sched(7), "The autogroup feature": where it is on, nice values count only within a session.
    """
    os.setpriority(os.PRIO_PROCESS, pid, 19)
    group = Path(f"/proc/{pid}/autogroup")
    if group.exists():
        group.write_text("19")


def tracked(plan: Plan) -> Iterator[Figure]:
    """A training loop that reports every step, with MLflow and without it, by turns of some seconds."""
    servers = {True: "a server that takes no CPU time from the ranks", False: "one that shares their cores"}
    for aside, where in servers.items():
        compared = turns.Compared()
        with _server(aside=aside) as uri:
            env = {**QUIET, "MLFLOW_TRACKING_URI": uri}
            with plan.warm(LINE, env=env) as first, plan.warm(LINE, env=env) as second:
                first.good("import mlflow")
                mine, other = (
                    partial(turns.in_a_cell, notebook, f"{LINE} --fresh {track}", how="unchanged", reports=True)
                    for notebook, track in ((first, "--track mlflow"), (second, ""))
                )
                for number in plan.times(6, 2):
                    with turns.both(mine, other, number=number) as pair:
                        compared.add(*turns.rates(*pair, steps=300, pairs=plan.times(10, 6)))
        yield Figure(
            what=f"training that reports every step, 2 ranks: with MLflow ({where}) against without",
            measured=str(compared),
            target=">= 0.99" if aside else "",
            ok=compared.ratio >= 0.99 if aside else None,
            numbers={
                "ratios": compared.ratios,
                "with_steps_per_s": compared.mine,
                "without_steps_per_s": compared.other,
            },
        )


def hanging(plan: Plan) -> Iterator[Figure]:
    """A cell that is tracked at a server which accepts connections and is silent, and one that is not, by turns."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        env = {**QUIET, "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        with plan.warm("--ranks 2", env=env) as notebook:
            notebook.good("import mlflow")
            times: dict[str, list[float]] = {"--track mlflow": [], "": []}
            for _ in plan.times(30, 10):
                for track, taken in times.items():
                    began_s = time.perf_counter()
                    notebook.good(f"%%distributed --ranks 2 {track}\nprint(rank)")
                    taken.append(time.perf_counter() - began_s)
    with_it, without = times.values()
    more = statistics.median(with_it) - statistics.median(without)
    yield Figure(
        what="a cell whose MLflow server hangs, against one that is not tracked",
        measured=f"{spread(with_it)} against {spread(without)}",
        target="<= 20 ms more (median)",
        ok=more <= 0.02,
        numbers={"with_s": with_it, "without_s": without},
    )
