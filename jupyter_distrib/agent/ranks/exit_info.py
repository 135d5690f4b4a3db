"""Finds the reason why a process of this agent ended, from the system's report and its last output. Runs in the
agent."""

from __future__ import annotations

import os
import re
import select
import signal
from contextlib import suppress

from jupyter_distrib.agent.ranks import torch_log
from jupyter_distrib.system import crash_notes, file_owner
from jupyter_distrib.wire import messages as m

_CRASH_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d{1,9}) in (?P<function>.*)$')
_REPORT = "Fatal Python error: "
"""First words of a report by faulthandler."""
_DEVICE_ERROR = re.compile(rf"(?<={crash_notes.NO_DEVICE}).*|(?:CUDA|HIP|XPU) error: .*")
LAST_LINES = 20
ENDING_S = 1.0
"""Maximum seconds between a process closing its links and its end."""


def exit_code(wait_status: int) -> int:
    """Return the exit status, or minus the number of the signal."""
    return os.waitstatus_to_exitcode(wait_status)


def code_of_child(pid: int) -> int | None:
    """Return the exit code of an ending child without reaping it; None if unknown."""
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    with suppress(OSError):
        found = os.waitid(os.P_PID, pid, options)
        if found is None and hasattr(os, "pidfd_open"):
            with os.fdopen(os.pidfd_open(pid)) as end:
                select.select([end], [], [], ENDING_S)
            found = os.waitid(os.P_PID, pid, options)
        if found is not None:
            return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
    return None


def describe_end(code: int | None, *, out_of_memory: bool = False) -> str:
    """Describe how a process ended, as the end of a sentence: `was killed by SIGKILL`, `ended with exit status 3`."""
    if code is None:
        return "has ended"
    if code >= 0:
        return f"ended with exit status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}" + (", by the system's out-of-memory killer" if out_of_memory else "")


def is_crash(code: int) -> bool:
    """Return whether the signal is one that a process's own crash causes, so that a crash report was written."""
    return -code in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


def last_lines(tail: bytes) -> tuple[str, ...]:
    """Return the end of a rank's own output, without the crash report, which `crash_frames` reads."""
    text, report, _ = torch_log.without_stacks(tail).decode("utf-8", "replace").partition(_REPORT)
    if report:
        text = text.rstrip("\n")
    return tuple(text.splitlines()[-LAST_LINES:])


def device_error(tail: bytes) -> str:
    """Return the error of the GPU in a rank's own output; empty if there is none."""
    found = _DEVICE_ERROR.search(tail.decode("utf-8", "replace"))
    return found[0] if found else ""


def crash_frames(tail: bytes) -> tuple[m.Frame, ...]:
    """Return the Python frames of a crash report by faulthandler, outermost first, without this package's own."""
    return frames_in(tail.decode("utf-8", "replace").partition(_REPORT)[2])


def frames_in(report: str) -> tuple[m.Frame, ...]:
    """Return the Python frames in faulthandler output, outermost first, without this package's own."""
    matches = [_CRASH_FRAME.match(line) for line in report.splitlines()]
    frames = [
        m.Frame(filename=found["file"], line=int(found["line"]), function=found["function"])
        for found in matches
        if found and not file_owner.is_own(found["file"]) and not found["file"].startswith("<frozen ")
    ]
    return tuple(reversed(frames))
