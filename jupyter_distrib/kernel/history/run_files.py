"""The folder of saved runs: one small file for each, for this user alone, few and not old. Kernel side; several kernels
use it at the same time.

    history/00000012_a1b2c3-7.json      the number, and the id of the run
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from jupyter_distrib.errors import DistributedError
from jupyter_distrib.kernel.history import saved_run
from jupyter_distrib.kernel.history.saved_run import SavedRun
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.system import paths

DAY_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of the history, from the settings."""

    runs: int
    """The number of runs that are kept; 0: none is saved."""
    days: float
    """The age, in days, after which a run is removed."""


def folder() -> Path:
    """Return the folder. Raises `PoolError` if it cannot be made."""
    return paths.private(paths.state_directory() / "history", "XDG_STATE_HOME")


def save(runs: Iterable[tuple[SavedRun, RunRecord]], limits: Limits) -> None:
    """Write runs with the next numbers, unless they are there already, and remove what is too old or too much.

    Raises:
        OSError, PoolError: They cannot be written.
    """
    texts = {
        saved.run: f"{json.dumps(saved.summary())}\n{json.dumps(saved_run.metrics_to(record))}\n"
        for saved, record in runs
    }
    at = folder()
    with _alone(at):
        names = _names(at)
        there = {name.partition("_")[2] for name in names}
        for run, text in texts.items():
            if f"{run}.json" in there:
                continue  # a detached run that is attached again
            number = 1 + (_number(names[-1]) if names else 0)
            names.append(f"{number:08}_{run}.json")
            _write(at / names[-1], text)
        _remove_old(at, names, limits)


def _write(path: Path, text: str) -> None:
    """Write a file that is there whole or not at all."""
    unfinished = path.with_suffix(".part")
    try:
        with paths.opened(unfinished) as file:
            file.write(text.encode())
        unfinished.replace(path)
    except OSError:
        with suppress(OSError):
            unfinished.unlink()
        raise


def _remove_old(at: Path, names: list[str], limits: Limits) -> None:
    oldest_s = time.time() - limits.days * DAY_S
    surplus = max(0, len(names) - limits.runs)
    for place, name in enumerate(names):
        with suppress(FileNotFoundError):
            if place >= surplus and (at / name).stat().st_mtime >= oldest_s:
                return
            (at / name).unlink()


def load() -> list[SavedRun]:
    """Return all saved runs, oldest first; damaged files are left out."""
    at = folder()
    return list(_readable(at, _names(at)))


def find(name: str) -> SavedRun:
    """Return the run with this number, or with this id. Raises `DistributedError`."""
    at = folder()
    for saved in _readable(at, [file for file in _names(at) if _is_called(file, name)]):
        return saved
    raise DistributedError(f"no saved run has the number or id {name}: %distributed_runs lists them.")


def _is_called(file: str, name: str) -> bool:
    number, _, run = file.removesuffix(".json").partition("_")
    return run == name or (name.isdecimal() and int(name) == int(number))


def _readable(at: Path, names: list[str]) -> Iterator[SavedRun]:
    for name in names:
        with suppress(OSError, ValueError):
            yield saved_run.read(at / name)


def _names(at: Path) -> list[str]:
    """Return the names of the files, oldest first: numbers have eight digits."""
    return sorted(name for name in os.listdir(at) if name.endswith(".json") and name[:8].isdecimal())


def _number(name: str) -> int:
    return int(name.partition("_")[0])


@contextmanager
def _alone(at: Path) -> Iterator[None]:
    """Hold the folder for this process; the lock ends with it."""
    descriptor = os.open(at / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
