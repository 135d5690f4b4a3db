"""Consensus among ranks that read a data loader at the same place; they wait only as long as the others may still
arrive.

A rank that waits reads from the store what the others do:

    has ended its cell                                          it does not come
    averages gradients of a backward pass that is still ahead   it does not come: it waits for this rank in the pass
    waits for the ranks at another line                         one of the two is alone at its line: see `_is_alone`
    anything else                                               it may come, within `WAIT_S`

Rank's main thread, except `on_collective`.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from jupyter_distrib.interfaces import identity
from jupyter_distrib.worker.pytorch import process_group
from jupyter_distrib.worker.pytorch.rank_store import StoreBoard

WAIT_S = 10.0
_LOOK_UP_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class _LoaderReading:
    """One reading of a loader: its place in the code, and its number there, counted on every rank."""

    place: str
    number: int

    @property
    def key(self) -> str:
        return f"data/{self.place}/{self.number}"

    def of(self, rank: int) -> str:
        return f"{self.key}/{rank}"

    @property
    def everyones(self) -> list[str]:
        return [self.of(rank) for rank in range(identity.world_size())]

    @property
    def verdict(self) -> str:
        return f"{self.key}/verdict"

    @property
    def left(self) -> str:
        return f"{self.key}/left"


class DataConsensus:
    """The ranks' consensus on the data of one run.

    Args:
        ordered: Whether ranks waiting at the earlier of two places continue; else all wait until the timeout.
    """

    def __init__(self, *, ordered: bool) -> None:
        self._ordered = ordered
        self._been: Counter[str] = Counter()
        self._met: set[str] = set()
        """The places that all ranks have reached before."""
        self._begun = 0
        """Number of our own collectives, which every rank starts in the same order."""

    def first(self, place: str, data: str) -> str:
        """Return the description of the data on the rank that reached this place first. Waits for no rank."""
        if (board := process_group.current.board()) is None:
            return data
        reading = self._next(place)
        first = board.put_first(reading.key, data)
        _leave(board, reading, [reading.key], all_come=False)
        return first

    def decide(self, place: str, data_text: str, decided: Callable[[list[str]], str]) -> tuple[str, list[str]]:
        """Return the decision on the ranks' data, equal on all ranks, and the texts that describe the data.

        Both are empty if a rank does not arrive.
        """
        if (board := process_group.current.board()) is None:
            return "", []
        reading = self._next(place)
        board.put(reading.of(identity.rank()), data_text)
        every = self._wait(board, reading)
        if every:
            self._met.add(place)
        # The first rank that decides does so for all: another rank may have given up waiting a moment ago.
        verdict = board.put_first(reading.verdict, decided(every) if every else _NOTHING)
        _leave(board, reading, [*reading.everyones, reading.verdict], all_come=bool(every))
        return ("", []) if verdict == _NOTHING else (verdict, every)

    def on_collective(self, *, to_others: bool) -> None:
        """Record that a collective of all ranks starts; in any thread.

        Args:
            to_others: Whether to tell the other ranks, since one of them may wait for this one.
        """
        self._begun += 1
        if to_others and (board := process_group.current.board()) is not None:
            board.put(_begun(identity.rank()), str(self._begun))

    def end(self) -> None:
        """Announce that the cell has ended, so that no rank waits for this one."""
        if (board := process_group.current.board()) is not None:
            with suppress(RuntimeError):  # this rank was cut off from the store, as the others were or will be
                board.put(_ended(identity.rank()), "")

    def _next(self, place: str) -> _LoaderReading:
        self._been[place] += 1
        return _LoaderReading(place=place, number=self._been[place])

    def _wait(self, board: StoreBoard, reading: _LoaderReading) -> list[str]:
        """Return the texts of all ranks; empty if a rank does not arrive, or another rank has decided so."""
        rank, until_s = identity.rank(), time.monotonic() + WAIT_S
        board.put(_waits(rank), self._order(reading))
        while not board.has(reading.everyones) and not board.has([reading.verdict]):
            if self._is_alone(board, reading) or time.monotonic() > until_s:
                break
            time.sleep(_LOOK_UP_S)  # not `wait`, which prints a warning when its time is over
        board.put(_waits(rank), "")
        return [board.get(key) for key in reading.everyones] if board.has(reading.everyones) else []

    def _is_alone(self, board: StoreBoard, reading: _LoaderReading) -> bool:
        """Return whether none of the missing ranks will arrive before this one continues."""
        missing = [rank for rank in range(identity.world_size()) if not board.has([reading.of(rank)])]
        return all(self._stays_away(board, rank, reading) for rank in missing)

    def _stays_away(self, board: StoreBoard, rank: int, reading: _LoaderReading) -> bool:
        if board.has([_ended(rank)]):
            return True
        if board.has([_begun(rank)]) and int(board.get(_begun(rank))) > self._begun:
            return True
        if not self._ordered:
            return False
        waits = board.get(_waits(rank)) if board.has([_waits(rank)]) else ""
        if not waits:
            return False
        _, _, place, number = order = json.loads(waits)
        is_ahead = self._been[place] < number
        return is_ahead and bool(json.loads(self._order(reading)) < order)

    def _order(self, reading: _LoaderReading) -> str:
        """Return a sort key for places where ranks wait for one another; the ranks at the smaller one go on: a place
        where they have not all met before, then the line further up, which the other rank has passed."""
        line = re.search(r"\d+$", reading.place)
        return json.dumps([reading.place in self._met, int(line.group()) if line else 0, reading.place, reading.number])


_NOTHING = "nothing"


def _leave(board: StoreBoard, reading: _LoaderReading, keys: list[str], *, all_come: bool) -> None:
    """Release these keys, as every rank does when it no longer needs them; the last rank deletes them."""
    is_last = board.count(reading.left) == identity.world_size()
    if is_last:
        board.wipe([*keys, reading.left])
    if is_last or all_come:
        board.forget([*keys, reading.left])


def _waits(rank: int) -> str:
    return f"waits/{rank}"


def _begun(rank: int) -> str:
    return f"begun/{rank}"


def _ended(rank: int) -> str:
    return f"ended/{rank}"
