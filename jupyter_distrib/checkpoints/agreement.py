"""Lets all ranks that load from a folder load the same checkpoint, through the store.

Rank 0 knows best: it may still be writing. So at each `load` it leaves an answer under the number of the load, and
never waits for another rank. What another rank does:

neither rank 0 nor this rank has saved into the folder    reads the disk, and leaves what it finds in rank 0's place
otherwise                                                 waits for rank 0's answer, as long as rank 0 may come

Rank 0 no longer comes once it has ended its cell, or stays in a collective that the waiting rank has not reached; a
thread of rank 0 reports how many collectives it has called. The numbers are no longer equal when a rank has loaded
alone: an answer from before a collective that this rank has passed is skipped.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from weakref import WeakKeyDictionary

from jupyter_distrib.checkpoints import meeting
from jupyter_distrib.errors import DistributedError
from jupyter_distrib.system import outside_text
from jupyter_distrib.worker.pytorch import private
from jupyter_distrib.worker.pytorch.rank_store import StoreBoard

_LOOK_UP_S = 0.02
_REPORT_S = 0.1
_GONE_ON_S = 1.0
"""Seconds that rank 0 has to be ahead, since gloo counts messages between two ranks as collectives, too."""
_COLLECTIVES = "collectives/0"
_loads: WeakKeyDictionary[StoreBoard, Counter[str]] = WeakKeyDictionary()
"""Number of loads from each folder in a run, by which this rank knows its next one."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """The checkpoint that a rank has found at a load."""

    name: str
    """Its name in the folder; empty for the folder itself."""
    rank: int
    saves: int
    """Number of calls of `save` by that rank before."""
    collectives: dict[str, int]
    """Number of collectives of that rank before, in each group."""


def has_announced_saves(board: StoreBoard, folder: str) -> bool:
    """Return whether rank 0 has announced that it saves into this folder."""
    return board.has([_into(folder)])


def announce_save(board: StoreBoard, folder: str, name: str = "") -> None:
    """Announce that rank 0 saves into this folder, and the last checkpoint that it has begun there."""
    board.put(_into(folder), name)


def agreed(board: StoreBoard, folder: str, find: Callable[[], str], *, saves: int, rank: int) -> str:
    """Return the name of a checkpoint in the folder, the same on all ranks at a load that all of them call.

    Args:
        board: The board of this run.
        folder: The folder, absolute.
        find: Finds the newest checkpoint on the disk.
        saves: Number of times that this rank has saved into the folder.
        rank: This rank.

    Raises:
        DistributedError: Rank 0 does not come, or another rank has read the disk before.
    """
    own = _Answer(find() if rank == 0 else "", rank, saves, private.counts_of_groups())
    counts = _loads.setdefault(board, Counter())
    number, passed_over, waiting = counts[folder] + 1, None, _Waiting(board, own)
    while True:
        is_past = waiting.is_past()  # first: rank 0 may leave its answer, and go on
        key = f"load {folder}/{number}"
        if board.has([key]):
            answer = _read(board.get(key))
            if not _fits(answer, own):
                number, passed_over = number + 1, answer
                continue
        elif rank == 0:
            answer = _read(board.put_first(key, json.dumps(asdict(own))))
        elif not saves and not has_announced_saves(board, folder):
            answer = _read(board.put_first(key, json.dumps(asdict(_Answer(find(), rank, 0, own.collectives)))))
        elif is_past:
            if passed_over is None or not _is_last(board, folder, passed_over):
                raise _alone(rank)
            number, answer = number - 1, passed_over
        else:
            time.sleep(_LOOK_UP_S)
            continue
        if not _fits(answer, own) and answer is not passed_over:
            continue  # it has just been left by another rank; as above
        counts[folder] = number
        if rank == 0 and answer.name != own.name:
            raise _too_early(folder, answer, own)
        return answer.name


def _fits(answer: _Answer, own: _Answer) -> bool:
    """Return whether an answer may be that of the load which this rank has called: not one from before a collective
    that this rank has passed, nor one of rank 0 from before a `save` that this rank has called, too."""
    saved = own.rank == 0 or answer.rank != 0 or answer.saves >= own.saves
    return saved and not _ahead(own.collectives, answer.collectives)


def _is_last(board: StoreBoard, folder: str, answer: _Answer) -> bool:
    """Return whether rank 0 has begun no checkpoint since this answer."""
    return answer.rank == 0 and (
        not has_announced_saves(board, folder) or board.get(_into(folder)) in ("", answer.name)
    )


class _Waiting:
    """Finds out whether rank 0 will not come to a load of this rank any more."""

    def __init__(self, board: StoreBoard, own: _Answer) -> None:
        self._board, self._own = board, own
        self._ahead: tuple[str, float] = "", 0.0

    def is_past(self) -> bool:
        if self._own.rank == 0:
            return False
        if meeting.is_over(self._board, 0):
            return True
        reported = self._board.get(_COLLECTIVES) if self._board.has([_COLLECTIVES]) else "{}"
        if not _ahead(_counts(reported), self._own.collectives):
            return False
        if reported != self._ahead[0]:
            self._ahead = reported, time.monotonic()
        return time.monotonic() - self._ahead[1] >= _GONE_ON_S


class CollectiveReporter:
    """Reports to the other ranks, from a thread of rank 0, how many collectives it has called, until it is closed."""

    def __init__(self, board: StoreBoard) -> None:
        self._board, self._closed = board, threading.Event()
        self._thread = threading.Thread(target=self._report, name="jupyter_distrib: collectives", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _report(self) -> None:
        sent: dict[str, int] = {}
        with suppress(RuntimeError):  # the store is gone, and the run with it
            while not self._closed.wait(_REPORT_S):
                if (now := private.counts_of_groups()) != sent:
                    self._board.put(_COLLECTIVES, json.dumps(sent := now))


def _ahead(one: Mapping[str, int], other: Mapping[str, int]) -> bool:
    """Return whether one rank has called more collectives than another, in any group that both have."""
    return any(one[group] > other[group] for group in one.keys() & other.keys())


def _read(text: str) -> _Answer:
    try:
        given = json.loads(text)
        answer = _Answer(given["name"], int(given["rank"]), int(given["saves"]), _counts(given["collectives"]))
    except (ValueError, TypeError, KeyError):
        raise _misled(text) from None
    return answer


def _counts(given: str | Mapping[str, int]) -> dict[str, int]:
    try:
        found = json.loads(given) if isinstance(given, str) else given
        return {str(group): int(count) for group, count in found.items()}
    except (ValueError, TypeError, AttributeError):
        raise _misled(str(given)) from None


def _misled(text: str) -> DistributedError:
    return DistributedError(
        f"rank 0 seems to have left {outside_text.shown(text)!r}, which is no answer of a load: another program has "
        "written into the ranks' torch store."
    )


def _alone(rank: int) -> DistributedError:
    return DistributedError(
        f"jupyter_distrib.load() was called on rank {rank}, and rank 0, which decides, has gone on or ended its cell "
        "without a call: after a save in the same cell, call it on every rank."
    )


def _too_early(folder: str, answer: _Answer, own: _Answer) -> DistributedError:
    return DistributedError(
        f"rank {answer.rank} has loaded {answer.name or 'what was there'} from {folder}, and rank 0 now finds "
        f"{own.name or 'the folder itself'}: that rank did not know yet that rank 0 saves there. Call "
        "jupyter_distrib.save() on every rank, or torch.distributed.barrier() between save and load."
    )


def _into(folder: str) -> str:
    return f"checkpoints/{folder}"
