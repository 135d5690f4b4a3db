"""Why a rank's process ended, from what the system and its last words tell. Runs in the agent."""

from __future__ import annotations

import os
import re
import signal
from contextlib import suppress
from pathlib import Path

from jupyter_distrib import environment
from jupyter_distrib.events import Frame

_CRASH_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_REPORT = "Fatal Python error: "
"""How faulthandler begins."""
LAST_LINES = 20
_PROC, _CONTROL_GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_NO_LIMIT_BYTES = 1 << 60
"""Version 1 of control groups writes a number even larger where there is none."""


def exit_code(wait_status: int) -> int:
    """The exit status, or minus the number of the signal."""
    return os.waitstatus_to_exitcode(wait_status)


def is_crash(code: int) -> bool:
    """A fatal signal that the process caused itself, so that a crash report was written."""
    return -code in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


def last_lines(tail: bytes) -> tuple[str, ...]:
    """The end of what it wrote itself: the crash report is read by `crash_frames`."""
    text, report, _ = tail.decode("utf-8", "replace").partition(_REPORT)
    if report:
        text = text.rstrip("\n")
    return tuple(text.splitlines()[-LAST_LINES:])


def crash_frames(tail: bytes) -> tuple[Frame, ...]:
    """The Python lines of a report by faulthandler, outermost first, without this package's own."""
    return frames_in(tail.decode("utf-8", "replace").partition(_REPORT)[2])


def frames_in(report: str) -> tuple[Frame, ...]:
    """The Python lines of what faulthandler wrote, outermost first, without this package's own."""
    matches = [_CRASH_FRAME.match(line) for line in report.splitlines()]
    frames = [
        Frame(filename=found["file"], line=int(found["line"]), function=found["function"])
        for found in matches
        if found and not found["file"].startswith((*environment.OWN, "<frozen "))
    ]
    return tuple(reversed(frames))


def out_of_memory_kills(proc: Path = _PROC, mount: Path = _CONTROL_GROUPS) -> int:
    """How often the out-of-memory killer has struck in this control group, which is that of the ranks; on the whole
    machine where no group tells (docs.kernel.org/admin-guide/cgroup-v2.html: it counts whichever limit was met)."""
    for group in _groups(proc, mount)[:1]:
        for name in ("memory.events.local", "memory.events", "memory.oom_control"):
            if (count := _counter(group / name)) is not None:
                return count
    return _counter(proc / "vmstat") or 0


def memory_limit_bytes(proc: Path = _PROC, mount: Path = _CONTROL_GROUPS) -> int:
    """What this control group may use at most; 0 without a limit."""
    limits = []
    for group in _groups(proc, mount):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):  # `max`
                limits.append(int((group / name).read_text()))
    return min((limit for limit in limits if limit < _NO_LIMIT_BYTES), default=0)


def _groups(proc: Path = _PROC, mount: Path = _CONTROL_GROUPS) -> list[Path]:
    """Folders of the control groups for memory that this process is in, the innermost first."""
    paths: dict[str, str] = {}
    with suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            _, controller, path = line.split(":", 2)
            paths[controller] = path.strip("/")
    for controller, root in (("memory", mount / "memory"), ("", mount)):
        if controller in paths and root.is_dir():
            own = root / paths[controller]
            if ".." in own.parts or not own.is_dir():
                own = root  # a container sees its own group there, by the name that it has outside
            return [own, *(folder for folder in own.parents if folder.is_relative_to(root))]
    return []


def _counter(path: Path) -> int | None:
    with suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None
