"""Finds the reason why a rank's process ended, from the system's report and the rank's last output. Runs in the
agent."""

from __future__ import annotations

import os
import re
import signal

from jupyter_distrib.system import file_owner
from jupyter_distrib.wire.messages import Frame

_CRASH_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_REPORT = "Fatal Python error: "
"""First words of a report by faulthandler."""
LAST_LINES = 20


def exit_code(wait_status: int) -> int:
    """Return the exit status, or minus the number of the signal."""
    return os.waitstatus_to_exitcode(wait_status)


def is_crash(code: int) -> bool:
    """Return whether a process caused its fatal signal itself, so that a crash report was written."""
    return -code in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


def last_lines(tail: bytes) -> tuple[str, ...]:
    """Return the end of a rank's own output, without the crash report, which `crash_frames` reads."""
    text, report, _ = tail.decode("utf-8", "replace").partition(_REPORT)
    if report:
        text = text.rstrip("\n")
    return tuple(text.splitlines()[-LAST_LINES:])


def crash_frames(tail: bytes) -> tuple[Frame, ...]:
    """Return the Python frames of a crash report by faulthandler, outermost first, without this package's own."""
    return frames_in(tail.decode("utf-8", "replace").partition(_REPORT)[2])


def frames_in(report: str) -> tuple[Frame, ...]:
    """Return the Python frames in a text by faulthandler, outermost first, without this package's own."""
    matches = [_CRASH_FRAME.match(line) for line in report.splitlines()]
    frames = [
        Frame(filename=found["file"], line=int(found["line"]), function=found["function"])
        for found in matches
        if found and not file_owner.is_own(found["file"]) and not found["file"].startswith("<frozen ")
    ]
    return tuple(reversed(frames))
