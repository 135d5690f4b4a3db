"""The files about machines that are started on demand, so that they stay known whatever process is killed.

    STATE/machines/KEY/record     their last known state; written by their keeper only
                      /held       locked by the keeper, as long as it lives
                      /used       locked, shared, by every process that needs them now; its time is that of the last use
                      /end        the reason why they should be ended now; the keeper removes it
                      /log        the output of `up`, `hosts_from`, `status` and `down`

A lock ends with its process, however that ends. Any process; standard library only."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from jupyter_distrib.errors import PoolError
from jupyter_distrib.options import duration_s
from jupyter_distrib.pools.machines.options import MACHINES
from jupyter_distrib.system import paths, record_file
from jupyter_distrib.system.record_file import DamagedFile

STARTING, UP, ENDING, ENDED = "starting", "up", "ending", "ended"
LARGEST_BYTES = 1 << 20
TAIL_BYTES = 8192
HOLD_TRIES, HOLD_S = 10, 0.05
_IDENTITY = ("up", "down", "hosts", "hosts_from")
_DEFAULTS = {option.name: option.default for option in MACHINES}


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One life of the machines, from just before `up` until `down` has succeeded. Times are seconds since 1970."""

    life: str
    """A random name."""
    state: str
    plan: dict[str, str]
    """The options of the pool that concern the machines, as texts."""
    path: str
    """PATH for the commands."""
    began_at_s: float
    up_at_s: float = 0.0
    """The time at which `up` had succeeded; 0 before."""
    ended_at_s: float = 0.0
    hosts: str = ""
    """The hosts, as in the option, once they are up."""
    line: str = ""
    """The last line that `up` has written."""
    reason: str = ""
    """The reason why they are ended, or were."""
    failures: int = 0
    """The number of times that `down` has failed."""
    failure: str = ""
    """The reason for its last failure."""
    next_at_s: float = 0.0
    """The time at which `down` is tried again."""
    gone: bool = False
    """Whether `status` says that they are not up, after a `down` that has failed."""
    keeper: int = 0
    up_pid: int = 0
    up_began: str = ""
    """Start time of that process, which distinguishes it from later ones with the same number."""

    @property
    def alive(self) -> bool:
        """Return whether machines may exist."""
        return self.state != ENDED

    @property
    def price(self) -> float:
        """Return the price of an hour; 0 if unknown."""
        return float(self.plan.get("price", "0"))

    @property
    def ends_at_s(self) -> float:
        """Return the time at which the machines are ended in any case; 0 for none."""
        limit_s = duration_s(self.plan.get("at_most", ""))
        return self.began_at_s + limit_s if limit_s else 0.0

    def seconds(self, name: str) -> int:
        """Return a duration among the options, by its name."""
        return duration_s(self.plan.get(name) or _DEFAULTS[name])

    def elapsed_s(self, now_s: float) -> float:
        """Return for how long the machines have existed."""
        return max(0.0, (self.ended_at_s or now_s) - self.began_at_s)

    def cost(self, now_s: float) -> float:
        """Return the cost of the machines so far; 0 if the price is unknown."""
        return self.elapsed_s(now_s) / 3600 * self.price


@dataclass(frozen=True, slots=True)
class Place:
    """The folder of machines."""

    folder: Path

    @classmethod
    def of(cls, options: Mapping[str, str]) -> Place:
        """Return the folder of the machines of a pool with these options; it need not exist."""
        identity = json.dumps([options.get(name, "") for name in _IDENTITY])
        return cls(_folder() / hashlib.sha256(identity.encode()).hexdigest()[:16])

    def made(self) -> Place:
        """Return the place, after making its folder."""
        paths.clear(self.folder, stat.S_IFDIR)
        paths.private(self.folder)
        return self

    @property
    def log(self) -> Path:
        return self.folder / "log"

    @property
    def keeper_log(self) -> Path:
        return self.folder / "keeper.log"

    def record(self) -> Record | None:
        """Return the record; None if there is none."""
        try:
            return record_file.record_of(Record, record_file.json_of(record_file.text_of(self.folder / "record")))
        except (OSError, DamagedFile):
            return None

    def write(self, record: Record) -> None:
        """Replace the record."""
        paths.write_whole(self.folder / "record", json.dumps(asdict(record)))

    def forgotten(self) -> bool:
        """Return whether the user has removed the record."""
        return not (self.folder / "record").exists()

    def hold(self) -> BinaryIO | None:
        """Return the lock of the keeper, which lasts until it is closed; None if there is a keeper."""
        file = paths.opened(self.folder / "held", emptied=False)
        for _ in range(HOLD_TRIES):
            if _locked(file, fcntl.LOCK_EX):
                return file
            time.sleep(HOLD_S)  # another process may just be checking
        file.close()
        return None

    def is_held(self) -> bool:
        """Return whether there is a keeper."""
        with paths.opened(self.folder / "held", emptied=False) as file:
            return not _locked(file, fcntl.LOCK_SH)

    def ask_for_end(self, reason: str) -> None:
        """Request the end of the machines now, even if they are in use."""
        paths.write_whole(self.folder / "end", reason)

    def asked_for_end(self) -> str:
        """Return the reason of a request to end the machines now, once; empty without a request."""
        with suppress(OSError, DamagedFile):
            reason = record_file.text_of(self.folder / "end", LARGEST_BYTES)
            (self.folder / "end").unlink()
            return reason
        return ""

    def log_tail(self, start: int) -> str:
        """Return the end of the log, at most the part after this many bytes."""
        with suppress(OSError), record_file.opened(self.log) as file:
            file.seek(max(start, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            return file.read(TAIL_BYTES).decode("utf-8", "replace")
        return ""


class Use:
    """The lock of one process on machines that it needs; several parts of it may need them at the same time."""

    def __init__(self, place: Place) -> None:
        self._file = paths.opened(place.folder / "used", emptied=False)

    def begin(self) -> None:
        """Need the machines from now on."""
        fcntl.flock(self._file, fcntl.LOCK_SH)

    def end(self) -> None:
        """Stop needing the machines."""
        os.utime(self._file.fileno())
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        self._file.close()

    def claim(self) -> bool:
        """Return whether nobody needs the machines; if so, nobody can claim them until `leave`."""
        return _locked(self._file, fcntl.LOCK_EX)

    def leave(self) -> None:
        """Let others need the machines again."""
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def last_s(self) -> float:
        """Return the time at which somebody last needed the machines."""
        return os.fstat(self._file.fileno()).st_mtime


def _locked(file: BinaryIO, how: int) -> bool:
    """Lock a file without waiting; return whether that has succeeded, which it never does where there are no locks."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def known() -> Iterator[tuple[Place, Record]]:
    """Return all machines of this user that are known here."""
    with suppress(PoolError, OSError):
        for path in sorted(_folder().iterdir()):
            place = Place(path)
            if (record := place.record()) is not None:
                yield place, record


def _folder() -> Path:
    folder = paths.state_directory() / "machines"
    paths.clear(folder, stat.S_IFDIR)
    return paths.private(folder)
