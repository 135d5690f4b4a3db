"""The folder of saved runs: one small file for each, for this user alone, few and not old. Kernel side; several kernels
use it at the same time.

    history/00000012_a1b2c3-7.json      the number, and the id of the run
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
import weakref
from bisect import insort
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from jupyter_distrib.errors import DistributedError, PoolError
from jupyter_distrib.kernel.history import saved_run
from jupyter_distrib.kernel.history.saved_run import SavedRun
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.system import paths
from jupyter_distrib.system.record_file import DamagedFile

DAY_S = 86_400.0
TOTAL_BYTES = 1_000_000_000
"""Limit on the size of all saved runs together."""
_CLOCKS_DIFFER_S = 3600.0
"""Seconds by which the clock of a file system, as on NFS, may be behind this process's."""
_known_runs: weakref.WeakValueDictionary[tuple[str, int, int, int], SavedRun] = weakref.WeakValueDictionary()
"""The runs that the notebook still has, by path, inode, time of change and size of their files: IPython keeps every
list that it has shown, and each would have hundreds of its own."""
_NAME = re.compile(r"[0-9]{8}_.+\.json", re.ASCII | re.DOTALL)
_LAST = 99_999_999
_PREFIX = len("00000012_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of the history, from the settings: the user's for all runs, and a project's for its own."""

    runs: int | None
    """Number of runs to keep; None for any number."""
    days: float
    """Age in days after which a run is removed."""
    project: str = ""
    """Folder of the project to which the next limits apply."""
    project_runs: int | None = None
    """Number of the project's own runs to keep; None for any number."""
    project_days: float | None = None
    """Age in days after which a run of the project is removed; None for the limit of all runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRuns:
    """The saved runs whose files can be read."""

    runs: list[SavedRun]
    """The runs, oldest first."""
    note: str = ""
    """A sentence on the files that were left out; empty if there are none."""


def folder() -> Path:
    """Return the folder. Raises `PoolError` if it cannot be made."""
    return paths.private(paths.state_directory() / "history", "XDG_STATE_HOME")


def save(runs: Iterable[tuple[SavedRun, RunRecord]], limits: Limits) -> None:
    """Write runs under the next numbers, unless they are saved already, and remove runs beyond the limits.

    Raises:
        OSError, PoolError: One cannot be written; those before it are.
    """
    texts = {
        saved.run: f"{json.dumps(saved.summary())}\n{json.dumps(saved_run.metrics_to(record))}\n"
        for saved, record in runs
    }
    at = _folder_to_write()
    with _locked(at), _present(at) as listing:
        there = {name[_PREFIX:] for name in listing.names}
        try:
            for run, text in texts.items():
                if f"{run}.json" in there:
                    continue  # a detached run that is attached again
                name = f"{listing.last + 1:08}_{run}.json"
                paths.write_whole(at / name, text, tidy=False)
                insort(listing.names, name)
        finally:  # also where the disk is full
            _remove_old(listing, limits)


@dataclass(slots=True, kw_only=True)
class _Listing:
    """The names of the files, cached until another process changes the folder: else hundreds would be read for each
    cell."""

    at: Path
    names: list[str]
    """The names, oldest first."""
    sizes: dict[str, int] = field(default_factory=dict)
    """File sizes in bytes, as far as known."""
    projects: dict[str, str | None] = field(default_factory=dict)
    """The project of each run whose file was read, by file name; None for a damaged file."""
    state: tuple[int, ...] = ()
    """State of the folder after this kernel last wrote to it; empty if unknown."""

    @property
    def last(self) -> int:
        """The highest number in use."""
        numbers = [int(name.partition("_")[0]) for name in self.names[-1:]]
        if numbers and numbers[0] >= _LAST:
            numbers = [each for name in self.names if (each := int(name.partition("_")[0])) < _LAST]
        return max(numbers, default=0)

    def project(self, name: str) -> str | None:
        if name not in self.projects:
            run = _read(self.at / name)
            self.projects[name] = None if run is None else run.project
        return self.projects[name]


_known: _Listing | None = None
"""The last listing; used by the thread that holds the folder."""


@contextmanager
def _present(at: Path) -> Iterator[_Listing]:
    """Provide the listing of the folder for changes, and keep it for the next call. Raises `OSError`."""
    global _known
    if _known is None or _known.at != at or not _known.state or _known.state != _state(at):
        paths.remove_unfinished(at)
        _known = _Listing(at=at, names=_names(at))
    yield _known
    _known.state = _marked(at)  # not after a failure: the next save reads the folder that the failed one has changed


def _state(at: Path) -> tuple[int, ...]:
    info = at.stat()
    return info.st_dev, info.st_ino, info.st_mtime_ns


def _marked(at: Path) -> tuple[int, ...]:
    """Give the folder a modification time that no other change gives it: the clocks of file systems are coarse, and
    another kernel may write at the same tick. Return its state; empty where such a time cannot be kept."""
    now_ns = time.time_ns()
    with suppress(OSError):
        os.utime(at, ns=(now_ns, now_ns))
        if (state := _state(at))[-1] == now_ns:
            return state
    return ()


def _remove_old(listing: _Listing, limits: Limits) -> None:
    now_s = _now_s(listing)
    left = _within_total(listing, _pruned(listing.at, listing.names, limits.runs, now_s - limits.days * DAY_S))
    if limits.project_runs is not None or limits.project_days is not None:
        own = [name for name in left if listing.project(name) == limits.project]
        days = limits.days if limits.project_days is None else limits.project_days
        gone = set(own).difference(_pruned(listing.at, own, limits.project_runs, now_s - days * DAY_S))
        left = [name for name in left if name not in gone]
    listing.names = left


def _now_s(listing: _Listing) -> float:
    """Return the present time or, where it is hours after the newest file, which has just been written, the time of
    that file: a cell may have set the clock of its notebook for a test, and all runs would seem old."""
    now_s = time.time()
    with suppress(OSError, IndexError):
        written_s = (listing.at / listing.names[-1]).lstat().st_mtime
        return written_s if now_s - written_s > _CLOCKS_DIFFER_S else now_s
    return now_s


def _pruned(at: Path, names: list[str], runs: int | None, oldest_s: float) -> list[str]:
    """Remove the oldest of these files until number and age are within the limits. Return the names of the others."""
    surplus = 0 if runs is None else max(0, len(names) - runs)
    for place, name in enumerate(names):
        with suppress(OSError):
            if place >= surplus and (at / name).lstat().st_mtime >= oldest_s:
                return names[place:]
            (at / name).unlink()
    return []


def _within_total(listing: _Listing, names: list[str]) -> list[str]:
    """Remove the oldest of these files until their total size is within the limit. Return the names of the others."""
    sizes = listing.sizes
    for name in [name for name in names if name not in sizes]:
        sizes[name] = 0
        with suppress(OSError):
            sizes[name] = (listing.at / name).lstat().st_size
    total = sum(map(sizes.__getitem__, names))
    if total <= TOTAL_BYTES:
        return names
    total = 0
    for place, name in reversed([*enumerate(names)]):
        total += sizes[name]
        if total > TOTAL_BYTES:
            for each in names[: place + 1]:
                with suppress(OSError):
                    (listing.at / each).unlink()
            return names[place + 1 :]
    return names


def load() -> list[SavedRun]:
    """Return all saved runs, oldest first; damaged files are left out."""
    return load_with_note().runs


def load_with_note() -> SavedRuns:
    """Return all saved runs, with a note on the files that cannot be read."""
    try:
        at = folder()
        read = {name: _read(at / name) for name in _names(at)}
    except (OSError, PoolError) as error:
        return SavedRuns(runs=[], note=f"The saved runs cannot be read: {error}")
    damaged = [name for name, run in read.items() if run is None and os.path.lexists(at / name)]
    return SavedRuns(runs=[run for run in read.values() if run is not None], note=_left_out(at, damaged))


def _left_out(at: Path, damaged: list[str]) -> str:
    if not damaged:
        return ""
    if len(damaged) == 1:
        return f"One saved run is left out, since its file is damaged: {at / damaged[0]}"
    return f"{len(damaged)} saved runs are left out, since their files are damaged; the first is {at / damaged[0]}"


def find(name: str) -> SavedRun:
    """Return the run with this number, or with this id. Raises `DistributedError`."""
    try:
        at = folder()
        for file in _names(at):
            if _is_called(file, name) and (saved := _read(at / file)) is not None:
                return saved
    except OSError as error:
        raise DistributedError(f"the saved runs cannot be read: {error}") from None
    raise DistributedError(f"no saved run has the number or id {name}: %distributed_runs lists them.")


def _is_called(file: str, name: str) -> bool:
    number, _, run = file.removesuffix(".json").partition("_")
    return run == name or (name.isdecimal() and int(name) == int(number))


def _read(path: Path) -> SavedRun | None:
    """Return the run in a file; None if the file is gone or damaged."""
    with suppress(OSError, DamagedFile):
        info = path.lstat()
        key = str(path), info.st_ino, info.st_mtime_ns, info.st_size
        if (run := _known_runs.get(key)) is None:
            run = _known_runs[key] = saved_run.read(path)
        return run
    return None


def _names(at: Path) -> list[str]:
    """Return the names of the files, oldest first: numbers have eight digits. Raises `OSError`."""
    return sorted([name for name in os.listdir(at) if _NAME.fullmatch(name)])


@contextmanager
def _locked(at: Path) -> Iterator[None]:
    """Lock the folder for this process; the lock ends with the process."""
    with paths.opened(at / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
