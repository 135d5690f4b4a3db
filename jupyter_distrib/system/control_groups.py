"""Reads the limits that control groups set for a process: a container's limits are visible nowhere else. On systems
other than Linux, and without limits, it gives the machine's values. Any process.

Version 1 and 2, docs.kernel.org/admin-guide/cgroup-v2.html and /cgroup-v1. The tightest limit may be set on any group
above ours.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_PROC, _MOUNT = Path("/proc"), Path("/sys/fs/cgroup")
_OWN = "self"
_NO_LIMIT_BYTES = 1 << 60
"""Size from which a limit counts as no limit: version 1 writes an even larger number for that."""


def cores(proc: Path = _PROC, mount: Path = _MOUNT, pid: int | str = _OWN) -> int:
    """Return the number of cores that a process can keep busy: the cores that it may run on, limited by its CPU quota.
    Raises `ProcessLookupError` if it is gone."""
    number = 0 if pid == _OWN else int(pid)
    here = len(os.sched_getaffinity(number)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([here, *_cores_of_groups(proc, mount, pid)])


def _cores_of_groups(proc: Path, mount: Path, pid: int | str) -> Iterator[int]:
    for group in folders("cpu", proc, mount, pid):
        with suppress(OSError, ValueError, ZeroDivisionError):  # `max`
            quota_us, period_us = map(int, (group / "cpu.max").read_text().split())
            yield max(1, -(-quota_us // period_us))
        quota_us, period_us = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
        if quota_us > 0 and period_us > 0:
            yield -(-quota_us // period_us)


def memory_limit_bytes(proc: Path = _PROC, mount: Path = _MOUNT, pid: int | str = _OWN) -> int:
    """Return the memory limit in bytes; 0 without a limit."""
    return min((limit for _, limit in _memory_limits(proc, mount, pid)), default=0)


def free_memory_bytes(proc: Path = _PROC, mount: Path = _MOUNT) -> int:
    """Return the number of bytes that can still be allocated under the system's and the groups' limits, page cache
    included, without swap; very large if unknown."""
    free = [_system_free_bytes(proc)]
    for group, limit in _memory_limits(proc, mount):
        used = max(_number(group / "memory.current"), _number(group / "memory.usage_in_bytes"))
        droppable = _counter(group / "memory.stat", "total_inactive_file", "inactive_file") or 0
        if used >= 0:
            free.append(max(0, limit - used + droppable))
    return min(free)


def _memory_limits(proc: Path, mount: Path, pid: int | str = _OWN) -> Iterator[tuple[Path, int]]:
    for group in folders("memory", proc, mount, pid):
        for name in ("memory.max", "memory.limit_in_bytes"):
            if 0 <= (limit := _number(group / name)) < _NO_LIMIT_BYTES:
                yield group, limit


def _system_free_bytes(proc: Path) -> int:
    kilobytes = _counter(proc / "meminfo", "MemAvailable:")
    return 1 << 62 if kilobytes is None else kilobytes * 1024


def out_of_memory_kills(proc: Path = _PROC, mount: Path = _MOUNT) -> int:
    """Return the number of kills by the out-of-memory killer in this group, which the ranks share, whichever limit
    was reached; on the whole machine where no group reports it."""
    for group in folders("memory", proc, mount)[:1]:
        for name in ("memory.events.local", "memory.events", "memory.oom_control"):
            if (count := _counter(group / name, "oom_kill")) is not None:
                return count
    return _counter(proc / "vmstat", "oom_kill") or 0


class OutOfMemoryKills:
    """Counts out-of-memory kills up to a moment, to detect later ones."""

    def __init__(self) -> None:
        self._count = out_of_memory_kills()

    def count(self) -> None:
        """Record the number of kills so far (a slow read)."""
        self._count = out_of_memory_kills()

    @property
    def grown(self) -> bool:
        """Return whether more kills have happened since."""
        return out_of_memory_kills() > self._count


def folders(controller: str, proc: Path = _PROC, mount: Path = _MOUNT, pid: int | str = _OWN) -> list[Path]:
    """Return the folders of the groups for `cpu` or `memory` that a process is in, the innermost first."""
    groups = {name: path for names, path in memberships(proc, pid) for name in names.split(",")}
    for name in (controller, ""):
        root = mount / name
        if name in groups and root.is_dir():
            own = folder_of(name, groups[name], mount) or root  # a container sees its own group there
            return [own, *(folder for folder in own.parents if folder.is_relative_to(root))]
    return []


def memberships(proc: Path = _PROC, pid: int | str = _OWN) -> list[tuple[str, str]]:
    """Return the groups of a process: the names of a hierarchy's controllers, empty for version 2, and the path of the
    group in it. Empty if the system does not tell; lines of another form are skipped."""
    text = membership_text(f"{proc}/{pid}/cgroup").decode("utf-8", "surrogateescape")
    lines = [line.split(":", 2) for line in text.split("\n")]  # any other separator may be in a name
    return [(parts[1], parts[2]) for parts in lines if len(parts) == 3]


def membership_text(path: str = "/proc/self/cgroup") -> bytes:
    """Return the system's text on the groups of a process; empty if it does not tell. Every cell asks for it."""
    text = b""
    with suppress(OSError):
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while more := os.read(file, 65_536):
                text += more
        finally:
            os.close(file)
    return text


def folder_of(controller: str, path: str, mount: Path = _MOUNT) -> Path | None:
    """Return the folder of a group; None if it is not visible from here, as from inside a container."""
    own = mount / controller / path.strip("/")
    return own if ".." not in own.parts and os.path.isdir(own) else None


def _number(path: Path) -> int:
    """Read a number from a file; -1 if there is none, as for `max`."""
    with suppress(OSError, ValueError):
        return int(path.read_text())
    return -1


def _counter(path: Path, *names: str) -> int | None:
    """Return the first of these counters that the file has."""
    with suppress(OSError, ValueError):
        found = dict(line.split(None, 1) for line in path.read_text().splitlines() if " " in line)
        for name in names:
            if name in found:
                return int(found[name].split()[0])
    return None
