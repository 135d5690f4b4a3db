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
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
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
        try:
            for run, text in texts.items():
                if f"{run}.json" in listing.runs:
                    continue  # a detached run that is attached again
                name = f"{listing.last + 1:08}_{run}.json"
                paths.write_whole(at / name, text, tidy=False)
                listing.add(name, len(text))
        finally:  # also where the disk is full
            _remove_old(listing, limits)


class _Listing:
    """The files, cached until another process changes the folder: else hundreds would be read for each cell."""

    def __init__(self, at: Path) -> None:
        self.at, self.base = at, paths.state_base()
        self.sizes = {name: _size(at / name) for name in _names(at)}
        """File sizes in bytes, by name, oldest first."""
        self.runs = {name[_PREFIX:] for name in self.sizes}
        """The names without the numbers."""
        self.projects: dict[str, str | None] = {}
        """The project of each run whose file was read, by file name; None for a damaged file."""
        self.state: tuple[int, ...] = ()
        """State of the folder after this kernel last wrote to it; empty if unknown."""

    @property
    def newest(self) -> str:
        """The name of the newest file; empty without files."""
        return next(reversed(self.sizes), "")

    @property
    def last(self) -> int:
        """The highest number in use."""
        last = int(self.newest.partition("_")[0] or 0)
        if last < _LAST:
            return last
        return max((each for name in self.sizes if (each := int(name.partition("_")[0])) < _LAST), default=0)

    def project(self, name: str) -> str | None:
        if name not in self.projects:
            run = _read(self.at / name)
            self.projects[name] = None if run is None else run.project
        return self.projects[name]

    def add(self, name: str, size: int) -> None:
        in_order = name > self.newest
        self.sizes[name] = size
        self.runs.add(name[_PREFIX:])
        if not in_order:
            self.sizes = dict(sorted(self.sizes.items()))

    def remove(self, names: Iterable[str]) -> None:
        """Remove these files; one that is gone already counts as removed."""
        for name in names:
            with suppress(OSError):
                (self.at / name).unlink()
            del self.sizes[name]
            self.runs.discard(name[_PREFIX:])


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


_known: _Listing | None = None
"""The last listing; used by the thread that holds the folder."""


def _folder_to_write() -> Path:
    """Return the folder, which needs no further check while it is as this kernel last left it. Raises `PoolError`."""
    if _known is not None and _known.state and _known.base == paths.state_base():
        with suppress(OSError):
            if _known.state == _state(_known.at):
                return _known.at
    return folder()


@contextmanager
def _present(at: Path) -> Iterator[_Listing]:
    """Provide the listing of the folder for changes, and keep it for the next call. Raises `OSError`."""
    global _known
    if _known is None or _known.at != at or not _known.state or _known.state != _state(at):
        paths.remove_unfinished(at)
        _known = _Listing(at)
    yield _known
    _known.state = _marked(at)  # not after a failure: the next save reads the folder that the failed one has changed


def _state(at: Path) -> tuple[int, ...]:
    info, above = at.lstat(), at.parent.lstat()
    return info.st_dev, info.st_ino, info.st_uid, info.st_mode, above.st_uid, above.st_mode, info.st_mtime_ns


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
    listing.remove(_surplus(listing.at, listing.sizes, limits.runs, now_s - limits.days * DAY_S))
    listing.remove(_beyond_total(listing.sizes))
    if limits.project_runs is not None or limits.project_days is not None:
        own = [name for name in listing.sizes if listing.project(name) == limits.project]
        days = limits.days if limits.project_days is None else limits.project_days
        listing.remove(_surplus(listing.at, own, limits.project_runs, now_s - days * DAY_S))


def _now_s(listing: _Listing) -> float:
    """Return the present time or, where it is hours after the newest file, which has just been written, the time of
    that file: a cell may have set the clock of its notebook for a test, and all runs would seem old."""
    now_s = time.time()
    with suppress(OSError):
        written_s = (listing.at / listing.newest).lstat().st_mtime
        return written_s if now_s - written_s > _CLOCKS_DIFFER_S else now_s
    return now_s


def _surplus(at: Path, names: Collection[str], runs: int | None, oldest_s: float) -> list[str]:
    """Return the oldest of these names, those beyond the limits on number and age; `names` has the oldest first."""
    beyond = 0 if runs is None else max(0, len(names) - runs)
    found = list(islice(names, beyond))
    for name in islice(names, beyond, None):
        with suppress(OSError):
            if (at / name).lstat().st_mtime >= oldest_s:
                break
        found.append(name)
    return found


def _beyond_total(sizes: Mapping[str, int]) -> list[str]:
    """Return the oldest of these names, as many as the limit on the total size requires."""
    total = sum(sizes.values())
    found = []
    for name, size in sizes.items():
        if total <= TOTAL_BYTES:
            break
        found.append(name)
        total -= size
    return found


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
