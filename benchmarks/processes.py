"""Looking at processes, and ending those that the benchmark started. Linux: reads /proc."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


def marked(name: str, value: str) -> list[int]:
    """Processes that were exec'd with this variable, and their forked children (which share that environment)."""
    mark = f"{name}={value}".encode()
    found = []
    for pid in (int(entry) for entry in os.listdir(PROC) if entry.isdigit()):
        with suppress(OSError):
            if pid != os.getpid() and mark in (PROC / str(pid) / "environ").read_bytes().split(b"\0"):
                found.append(pid)
    return found


def descendants(roots: Iterable[int]) -> set[int]:
    """Processes that descend from these, by their parents as of now."""
    children: dict[int, list[int]] = {}
    for pid in (int(entry) for entry in os.listdir(PROC) if entry.isdigit()):
        with suppress(OSError):
            parent = int((PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(pid)
    found, waiting = set(), list(roots)
    while waiting:
        for child in children.get(waiting.pop(), []):
            if child not in found:
                found.add(child)
                waiting.append(child)
    return found


def wait_until_idle(word: str, idle_s: float = 0.5) -> None:
    """Until no process with this word in its command line has used the processor for so long."""
    before = {}
    while (now := _used(word)) != before:
        before = now
        time.sleep(idle_s)


def _used(word: str) -> dict[int, int]:
    """Hundredths of a second of processor time, by pid."""
    found = {}
    for pid in (int(entry) for entry in os.listdir(PROC) if entry.isdigit()):
        with suppress(OSError):
            if word.encode() in (PROC / str(pid) / "cmdline").read_bytes():
                user, system = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[11:13]
                found[pid] = int(user) + int(system)
    return found


def end(find: Callable[[], list[int]]) -> None:
    """Kill what `find` finds until it finds nothing any more."""
    deadline = time.monotonic() + 10
    while (pids := find()) and time.monotonic() < deadline:
        kill(pids)


def kill(pids: Iterable[int]) -> None:
    """Kill these processes, and see them gone; a pid that is taken already is left alone."""
    fds = []
    for pid in pids:
        with suppress(ProcessLookupError):
            fds.append(os.pidfd_open(pid))
    for fd in fds:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(fd, signal.SIGKILL)
    for fd in fds:
        select.select([fd], [], [], 1.0)
        os.close(fd)


@dataclass(frozen=True, slots=True, kw_only=True)
class Census:
    """What a set of processes holds at one moment."""

    processes: int
    threads: int
    descriptors: int
    shared_files: int
    """Entries of /dev/shm."""
    memory_bytes: int
    """Pss: what several of them share counts once. (Private memory would count a page that a rank and its forkserver no
    longer share twice.)"""


def census(pids: Iterable[int]) -> Census:
    pids = list(pids)
    return Census(
        processes=len(pids),
        threads=sum(_count(pid, "task") for pid in pids),
        descriptors=sum(_count(pid, "fd") for pid in pids),
        shared_files=len(os.listdir("/dev/shm")),
        memory_bytes=pss_bytes(pids),
    )


def pss_bytes(pids: Iterable[int]) -> int:
    """Memory of processes together, what they share counted once.

    Without the pages of files: those of libtorch are shared with whoever else on the machine has loaded it.
    """
    return sum(_rollup(pid, ("Pss_Anon:", "Pss_Shmem:")) for pid in pids)


def peak_bytes(pid: int, *, reset: bool = False) -> int:
    """Highest resident memory of a process since the last reset."""
    if reset:
        (PROC / str(pid) / "clear_refs").write_text("5")
    for line in (PROC / str(pid) / "status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def _rollup(pid: int, names: tuple[str, ...]) -> int:
    with suppress(OSError):
        lines = (PROC / str(pid) / "smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(names))
    return 0


def _count(pid: int, what: str) -> int:
    with suppress(OSError):
        return len(os.listdir(PROC / str(pid) / what))
    return 0
