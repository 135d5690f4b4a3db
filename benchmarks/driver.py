"""A real kernel, driven as a front end drives it: cells in, outputs out, and what a user waits for measured in seconds.

Everything a notebook starts carries a mark in its environment, so that `close` ends exactly that and nothing else.
"""

from __future__ import annotations

import json
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import processes
from jupyter_client.manager import KernelManager

ROOT = Path(__file__).resolve().parent.parent
MARK = "JUPYTER_DISTRIB_BENCH_MARK"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class CellFailed(RuntimeError):
    """A cell that should have worked did not."""


@dataclass(slots=True)
class Outcome:
    """What one cell left in the notebook."""

    status: str = ""
    """`ok`, `error`, or `timeout`."""
    text: str = ""
    """Streams, values and tracebacks, in order of arrival."""
    displays: dict[str, str] = field(default_factory=dict)
    """The last text of every display that can be updated."""
    ename: str = ""
    messages: int = 0
    """Messages on iopub that carry output, those to widgets included."""
    size_bytes: int = 0
    """Of their contents, as JSON."""
    wall_s: float = 0.0
    """From sending the request to the idle message."""
    ended_s: float = 0.0
    """`time.monotonic()` when the idle message came."""

    @property
    def all_text(self) -> str:
        return "\n".join([self.text, *self.displays.values()])


class Notebook:
    """One kernel.

    Args:
        python: Interpreter of the kernel.
        package: Folder that `jupyter_distrib` is imported from; None where the kernel does not use it.
        runtime: Where agents of jupyter_distrib live; a new folder, hence no agent, unless given.
        argv: Start this instead of ipykernel.
    """

    def __init__(
        self,
        *,
        python: str = sys.executable,
        package: Path | None = ROOT,
        runtime: Path | None = None,
        env: dict[str, str] | None = None,
        argv: list[str] | None = None,
    ) -> None:
        self._owned = Path(tempfile.mkdtemp(prefix="jdb-"))
        self.runtime = runtime or self._owned
        self.folder = self._owned / "notebook"
        """The kernel's working directory: empty, since hosts may get copies of its files."""
        self.folder.mkdir()
        self.mark = self._owned.name
        self.manager = KernelManager(kernel_name="python3")
        self.manager.kernel_spec.argv = argv or [python, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        self._begin(env or {}, package)

    def _begin(self, env: dict[str, str], package: Path | None) -> None:
        began_s = time.monotonic()
        ours = {
            MARK: self.mark,
            "JUPYTER_DISTRIB_RUNTIME_DIR": str(self.runtime),
            "JUPYTER_DISTRIB_LOG_DIR": str(self.runtime / "logs"),
            **({"PYTHONPATH": str(package)} if package else {}),
        }
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.manager.start_kernel(cwd=str(self.folder), env={**os.environ, **ours, **env}, **quiet)
        self.client: Any = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=120)
        self.start_s = time.monotonic() - began_s

    def __enter__(self) -> Notebook:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return int(self.manager.provisioner.pid)

    def cell(self, code: str, timeout_s: float = 120.0) -> Outcome:
        """Run a cell to its end, or until the time is up (status `timeout`; it then still runs)."""
        return self.finish(self.send(code), timeout_s)

    def good(self, code: str, timeout_s: float = 120.0) -> Outcome:
        """The same for a cell that must work. Raises `CellFailed`."""
        outcome = self.cell(code, timeout_s)
        if outcome.status != "ok":
            raise CellFailed(f"{outcome.status}: {code[:80]!r}\n{outcome.all_text[-2000:]}")
        return outcome

    def value(self, expression: str) -> Any:
        """What a Python expression gives in the kernel, if its repr can be read back."""
        text = self.good(f"print('<<' + repr({expression}) + '>>')").text
        return eval(text.partition("<<")[2].rpartition(">>")[0], {})

    def send(self, code: str) -> tuple[str, float]:
        """Start a cell; give what comes back to `finish`."""
        began_s = time.monotonic()
        return self.client.execute(code, allow_stdin=False), began_s

    def finish(self, sent: tuple[str, float], timeout_s: float = 120.0) -> Outcome:
        message_id, began_s = sent
        outcome, deadline = Outcome(), time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                message = self.client.get_iopub_msg(timeout=left_s)
            except queue.Empty:
                break
            if message["parent_header"].get("msg_id") == message_id and _fold(outcome, message):
                outcome.ended_s = time.monotonic()
                outcome.wall_s = outcome.ended_s - began_s
                outcome.status = self._status(message_id)
                return outcome
        outcome.status, outcome.wall_s = "timeout", time.monotonic() - began_s
        return outcome

    def _status(self, message_id: str) -> str:
        while True:
            try:
                reply = self.client.get_shell_msg(timeout=10)
            except queue.Empty:
                return "no reply"
            if reply["parent_header"].get("msg_id") == message_id:
                return str(reply["content"]["status"])

    @property
    def cpu_s(self) -> float:
        """Processor time that the kernel has used, alone."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def interrupt(self) -> None:
        self.manager.interrupt_kernel()

    def restart(self) -> None:
        """As the front end's restart button does it."""
        self.manager.restart_kernel(now=True)
        self.client.wait_for_ready(timeout=120)

    def processes(self) -> list[int]:
        """The kernel and everything it started, agents and ranks included.

        By the mark and by descent: some programs overwrite the environment that /proc shows.
        """
        marked = processes.marked(MARK, self.mark)
        return sorted({*marked, *processes.descendants(marked)})

    def close(self) -> None:
        """End the kernel and everything that carries its mark."""
        everything = self.processes()
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()
        processes.kill(everything)
        processes.end(self.processes)
        shutil.rmtree(self._owned, ignore_errors=True)


def _fold(outcome: Outcome, message: dict[str, Any]) -> bool:
    """Take in one message; True if it says that the cell has ended."""
    kind, content = message["msg_type"], message["content"]
    if kind == "status":
        return bool(content["execution_state"] == "idle")
    if kind == "execute_input":
        return False
    outcome.messages += 1
    outcome.size_bytes += len(json.dumps(content, ensure_ascii=False))
    if kind == "stream":
        outcome.text += content["text"]
    elif kind in ("execute_result", "display_data", "update_display_data"):
        name = content.get("transient", {}).get("display_id")
        text = content["data"].get("text/plain", "")
        if name:
            outcome.displays[name] = text
        else:
            outcome.text += text
    elif kind == "error":
        outcome.ename = content["ename"]
        outcome.text += _COLOUR.sub("", "\n".join(content["traceback"]))
    return False
