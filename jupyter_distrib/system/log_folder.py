"""The folder of the logs of all runs, kept below a total size while ranks write into it.

    runs/removed-runs.txt     the runs whose logs were removed; locked by the process that removes some
    runs/a1b2c3-7/rank0.log   locked by the process that writes it, for as long as the run goes on

Agents, coordinators and kernels share it, also those of other containers and nodes. Each counts the runs and bytes that
it adds itself, and looks into the folder when these have come to a part of what is kept.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO, NamedTuple

from jupyter_distrib.errors import PoolError
from jupyter_distrib.system import formatting, record_file
from jupyter_distrib.system.record_file import DamagedFile

LIMIT_VARIABLE = "JUPYTER_DISTRIB_LOG_LIMIT_BYTES"
TOTAL_VARIABLE = "JUPYTER_DISTRIB_LOG_TOTAL_BYTES"
TOTAL_BYTES = 10_000_000_000
DISK_SHARE = 10
"""Divisor of the free disk space: the logs take at most one part in this many."""
KEPT_RUNS = 200
SMALL_BYTES = 16 << 10
"""Size up to which the log of a running run is never truncated."""
_PARTS = 16
"""Number of parts of the total; one stays free for the output that several processes write between two checks."""
_REMOVED = "removed-runs.txt"
_REMEMBERED_BYTES = 64 << 10
_RUN = re.compile(r"(check[0-9a-f]+-)?[0-9a-f]{6,}-\d+")
_LOG = re.compile(r"rank\d+\.log")


class _Run(NamedTuple):
    """The logs of one run; they sort by time of writing, oldest first."""

    written_at_s: float
    folder: str
    size_bytes: int


class LogFolder:
    """The folder, as one process sees it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.limit_bytes = chosen_bytes(TOTAL_VARIABLE) or TOTAL_BYTES
        """The total limit, as of the last check."""
        self._written = self._room = 0
        """Bytes that this process has written since the last check, and bytes that it may write before the next one."""
        self._new_runs = 0
        """Number of runs to which this process has given a folder since the last check."""
        self._notice = ""
        self._has_noted = False

    def make(self, run: Path) -> None:
        """Make the folder of a run if it is missing. Raises `OSError`."""
        if run.is_dir():
            return
        self._new_runs += 1
        if self._new_runs > KEPT_RUNS // _PARTS:  # a process may live for weeks, and its runs print a line each
            self.tidy()
        run.mkdir(mode=0o700, parents=True, exist_ok=True)

    def has_room(self, more_bytes: int, size_bytes: int) -> bool:
        """Return whether a log of this size may grow. Makes room, if there is none, by removing the logs of the runs
        that ended first."""
        self._written += more_bytes
        if self._written <= self._room:
            return True
        is_small = size_bytes + more_bytes <= min(SMALL_BYTES, self._part_bytes)
        if is_small and self._written <= self._room + self._part_bytes:
            return True
        self.tidy(more_bytes)
        self._written = more_bytes
        return is_small or more_bytes <= self._room

    def tidy(self, more_bytes: int = 0) -> None:
        """Remove the logs of old runs that have ended, if there are too many, or if all logs are too large once this
        many more bytes have come."""
        self._written, self._room, self._new_runs = 0, max(self._part_bytes, more_bytes), 0
        with suppress(OSError), self._alone() as alone:
            if alone:
                self._tidy(more_bytes)

    @property
    def full(self) -> str:
        """Return the reason why a log cannot grow."""
        return f"all logs together may take {formatting.size(self.limit_bytes)} ({TOTAL_VARIABLE})"

    def pop_notice(self) -> str:
        """Return a sentence for the user about removed logs, once; else empty."""
        notice, self._notice = self._notice, ""
        return notice

    @property
    def _part_bytes(self) -> int:
        return self.limit_bytes // (4 * _PARTS)

    def _tidy(self, more_bytes: int) -> None:
        runs = sorted(self._runs())
        total = sum(run.size_bytes for run in runs)
        free = shutil.disk_usage(self.path).free
        self.limit_bytes = chosen_bytes(TOTAL_VARIABLE) or min(TOTAL_BYTES, (free + total) // DISK_SHARE)
        most, removed = self.limit_bytes - self.limit_bytes // _PARTS, 0
        for place, run in enumerate(runs):
            is_surplus = place < len(runs) - KEPT_RUNS
            is_too_much = total > most - max(self._part_bytes, more_bytes) and run.size_bytes > 0
            if (is_surplus or is_too_much) and not _goes_on(run.folder) and self._remove(run.folder):
                total -= run.size_bytes
                removed += is_too_much and not is_surplus
        self._room = max(0, min(most - total, max(self._part_bytes, more_bytes)))
        if removed and not self._has_noted:
            self._has_noted = True
            runs_said = "the oldest run" if removed == 1 else f"the {removed} oldest runs"
            self._notice = f"the logs of {runs_said} were removed: {self.full}"

    def _runs(self) -> Iterator[_Run]:
        with os.scandir(self.path) as entries:
            for entry in entries:
                if _RUN.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False) and _is_ours(entry.stat()):
                    logs = list(_logs(entry.path))
                    written_at_s = max(each.st_mtime for each in (entry.stat(), *(info for _, info in logs)))
                    yield _Run(written_at_s, entry.path, sum(info.st_size for _, info in logs))

    def _remove(self, folder: str) -> bool:
        """Remove the logs of a run, and nothing else that may be in its folder."""
        with suppress(OSError):  # a full disk, or something else in its place
            self._note_removal(os.path.basename(folder))
        try:
            for path, _ in list(_logs(folder)):
                os.unlink(path)
        except OSError:
            return False
        with suppress(OSError):  # the folder holds something that is not ours
            os.rmdir(folder)
        return True

    def _note_removal(self, run: str) -> None:
        with _opened(self.path / _REMOVED) as file:
            known = file.read()[-_REMEMBERED_BYTES:]
            file.seek(0)
            file.write(known + f"{run}\n".encode())
            file.truncate()

    @contextmanager
    def _alone(self) -> Iterator[bool]:
        """Keep other processes from removing logs within the block; False if another one is doing so now."""
        with ExitStack() as stack:
            alone = True
            try:
                fcntl.flock(stack.enter_context(_opened(self.path / _REMOVED)), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:  # not every file system has locks: nothing is removed there, see `_goes_on`
                alone = error.errno != errno.EWOULDBLOCK
            yield alone


@cache
def of(path: Path) -> LogFolder:
    """Return the folder at this path: one object per process, which counts what the process writes."""
    return LogFolder(path)


def hold(log: int) -> None:
    """Lock the log of this descriptor, which must be readable too, as belonging to a running run."""
    with suppress(OSError):
        fcntl.flock(log, fcntl.LOCK_SH | fcntl.LOCK_NB)


def check(folder: Path) -> None:
    """Raise `PoolError` if the logs in this run's folder were removed because all logs were too large or too many."""
    with suppress(OSError, DamagedFile):
        if not any(_logs(str(folder))) and folder.name in record_file.text_of(folder.parent / _REMOVED).splitlines():
            raise PoolError(
                f"the logs of run {folder.name} were removed: of all logs the newest are kept, "
                f"{KEPT_RUNS} runs and as much as {TOTAL_VARIABLE} allows."
            )


def chosen_bytes(variable: str) -> int:
    """Return the size that the user has chosen by this variable; 0 for none, or for text that is not a number."""
    chosen = os.environ.get(variable, "")
    return int(chosen) if chosen.isdecimal() else 0


def limits() -> dict[str, str]:
    """Return the environment variables with the user's log limits, for agents on other nodes."""
    return {name: os.environ[name] for name in (LIMIT_VARIABLE, TOTAL_VARIABLE) if name in os.environ}


def _opened(path: Path) -> BinaryIO:
    """Open an existing file of this user; a link in its place is an error."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600), "r+b")


def _logs(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the logs in the folder of a run: regular files of this user, no links."""
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            info = entry.stat(follow_symlinks=False)
            if _LOG.fullmatch(entry.name) and stat.S_ISREG(info.st_mode) and _is_ours(info):
                yield entry.path, info


def _is_ours(info: os.stat_result) -> bool:
    return info.st_uid == os.getuid()


def _goes_on(folder: str) -> bool:
    """Return whether a process holds a log of this run, see `hold`; True where locks do not work."""
    for path, _ in _logs(folder):
        try:
            fd = os.open(
                path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            )  # NFS locks only what can be written, too
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(fd)
    return False
