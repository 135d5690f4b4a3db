"""Measures the machine's resources that a rank and its children use, and whether the rank is stopped. Runs in the
agent.

Reads a few small files of /proc for each process, about 0.1 ms for a rank with a dozen threads; elsewhere psutil is
used, which comes with ipykernel, and children are left out.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from jupyter_distrib.system import reap

_PROC = Path("/proc")
MAX_CHILDREN = 64
"""Maximum number of a rank's children that are measured, so that many children do not hold up the agent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The usage of one rank at one moment."""

    rss_bytes: int
    """Resident memory of the rank, plus each child's memory without the files and shared memory that it maps."""
    cpu_s: float
    """Processor time of the rank and its children since they began."""
    state: str
    """The system's letter for the process state: R running, S sleeping, T stopped, t traced by a debugger."""

    @property
    def stopped(self) -> bool:
        return self.state in ("T", "t")


def read(pid: int) -> Usage | None:
    """Read the usage of a rank; None if its process is gone, or nothing can be read."""
    return _from_proc(pid) if sys.platform == "linux" else _from_psutil(pid)


def has_runnable_thread(pid: int) -> bool:
    """Return whether a thread of the process runs or waits for a processor; False where the system does not tell."""
    try:
        threads = os.listdir(_PROC / str(pid) / "task")
    except OSError:
        return False
    for thread in threads:
        with suppress(OSError, IndexError):
            if (_PROC / str(pid) / "task" / thread / "stat").read_bytes().rpartition(b")")[2].split()[0] == b"R":
                return True
    return False


def catches(pid: int, signal_number: int) -> bool:
    """Return whether the process has a handler for this signal, which would otherwise end it."""
    with suppress(OSError, ValueError, IndexError):
        status = (_PROC / str(pid) / "status").read_text(errors="replace")  # the name may contain anything
        return bool(int(status.partition("\nSigCgt:")[2].split()[0], 16) >> (signal_number - 1) & 1)
    return False


def _from_proc(pid: int) -> Usage | None:
    try:
        state, ticks = _stat(pid)
        rss_bytes = reap.rss_bytes(pid)
    except (OSError, ValueError, IndexError):
        return None
    for child in _descendants(pid):
        with suppress(OSError, ValueError, IndexError):
            _, child_ticks = _stat(child)
            resident, shared = (_PROC / str(child) / "statm").read_text().split()[1:3]
            ticks += child_ticks
            rss_bytes += (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
    return Usage(rss_bytes=rss_bytes, cpu_s=ticks / os.sysconf("SC_CLK_TCK"), state=state)


def _stat(pid: int) -> tuple[str, int]:
    """Return the state, and the ticks of the process and of the children that it has waited for (proc_pid_stat(5))."""
    words = (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
    return words[0].decode(), sum(map(int, words[11:15]))


def _descendants(pid: int) -> list[int]:
    found = reap.children(pid)
    for parent in found:  # the list grows during the loop
        if len(found) >= MAX_CHILDREN:
            break
        found += reap.children(parent)
    return found[:MAX_CHILDREN]


def _from_psutil(pid: int) -> Usage | None:
    try:
        import psutil
    except ImportError:
        return None
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times = process.cpu_times()
            stopped = process.status() == psutil.STATUS_STOPPED
            return Usage(
                rss_bytes=process.memory_info().rss, cpu_s=times.user + times.system, state="T" if stopped else "S"
            )
    except psutil.Error:
        return None
