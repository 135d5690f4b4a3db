"""Compares a notebook's packages with those of this Python, and installs missing ones, before ranks start. Runs in the
agent's loop; `install_packages` does the work in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from jupyter_distrib.system.call_soon import CallSoon
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.link import encode

Report = dict[str, str]
"""The last line of `install_packages`: the fields of its `PackageReport`."""


class PackageSync:
    """The running comparisons.

    Args:
        calls: Calls functions of other threads in the loop.
    """

    def __init__(self, calls: CallSoon) -> None:
        self._calls = calls
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        """The process of each worker group that waits."""

    @property
    def sessions(self) -> set[int]:
        """The sessions of the processes that are under way."""
        return {process.pid for process in self._processes.values()}

    def start(self, command: m.OpenWorkerGroup, say: Callable[[str], object], then: Callable[[Report], object]) -> None:
        """Compare the packages of a worker group. `say` is called with the packages being installed, and `then` with
        the result, in the loop, unless the comparison is given up."""
        group = command.group
        with tempfile.TemporaryFile() as request:
            request.write(encode(command))
            request.seek(0)
            process = subprocess.Popen(
                [sys.executable, "-m", "jupyter_distrib.agent.install_packages"],
                stdin=request,
                stdout=subprocess.PIPE,
                cwd="/",
                start_new_session=True,
            )
        self._processes[group] = process

        def ended(report: Report) -> None:
            if self._processes.get(group) is process:
                del self._processes[group]
                then(report)

        def follow() -> None:
            report = self._follow(process, say)
            self._calls.put(lambda: ended(report))

        threading.Thread(target=follow, name="jupyter_distrib-packages", daemon=True).start()

    def _follow(self, process: subprocess.Popen[bytes], say: Callable[[str], object]) -> Report:
        """Wait for the end of a process, in a thread, and return its report."""
        report: Report = {}
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                report = _read(line)
                if text := report.get("installing"):
                    self._calls.put(partial(_report_installing, say, text))
        if "overlay" in report:
            return report
        return {"refusal": "the packages of the ranks could not be compared; the agent's log has the reason."}

    def give_up(self, group: str) -> None:
        """Stop the comparison for a worker group that is no longer wanted."""
        if (process := self._processes.pop(group, None)) is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _report_installing(say: Callable[[str], object], text: str) -> None:
    say(text)


def _read(line: bytes) -> dict[str, Any]:
    with suppress(ValueError):
        if isinstance(value := json.loads(line), dict):
            return value
    return {}
