"""Turns of ranks in one process: each has a thread, and only one of them runs at a time, until it waits for others.
Called in the threads of the ranks; `wait_for_end` and `stop` in any other.

When a rank waits, its process state is saved (`__main__`, streams, environment, random numbers), and restored when it
continues. If all ranks wait, none can ever continue: then each raises an error that says which rank waits where.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from jupyter_distrib.interfaces import identity
from jupyter_distrib.serialization import payload


class RankContext:
    """The process state of one rank: saved when the rank waits, and restored when it continues."""

    def __init__(self) -> None:
        self._order, self._cell = identity._order, identity.cell  # noqa: SLF001 - put back below
        self._main, self._streams = sys.modules["__main__"], (sys.stdin, sys.stdout, sys.stderr)
        self._environment, self._argv, self._path = dict(os.environ), getattr(sys, "argv", None), list(sys.path)
        self._kept = dict(payload.kept_values)
        self._random = random.getstate()
        self._torch: Any = torch.get_rng_state() if (torch := sys.modules.get("torch")) else None

    def put_back(self) -> None:
        identity._order, identity.cell = self._order, self._cell  # noqa: SLF001
        sys.modules["__main__"] = self._main
        sys.stdin, sys.stdout, sys.stderr = self._streams
        sys.argv, sys.path[:] = self._argv, self._path  # type: ignore[assignment]  # it may be anything
        for name in os.environ.keys() - self._environment.keys():
            del os.environ[name]
        for name, value in self._environment.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
        payload.kept_values.clear()
        payload.kept_values.update(self._kept)
        random.setstate(self._random)
        if self._torch is not None:
            sys.modules["torch"].set_rng_state(self._torch)


class Stage:
    """The turns of the ranks of one run."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self._left = list(ranks)
        """The ranks that have not ended yet."""
        self._waiting: dict[int, tuple[Callable[[], bool], str]] = {}
        self._turn = threading.Condition()
        self._now = ranks[0]
        self._trouble = ""
        self._stopped = False
        self._base = RankContext()

    def enter(self, rank: int) -> None:
        """Wait for the first turn of this rank."""
        with self._turn:
            self._turn.wait_for(lambda: self._now == rank)

    def leave(self, rank: int) -> None:
        """Leave all further turns to the others."""
        with self._turn:
            self._left.remove(rank)
            self._pass_on(rank)

    def wait(self, rank: int, ready: Callable[[], bool], what: str) -> None:
        """Let others run until `ready()`; `what` describes what this rank waits for, and where.

        Raises:
            RuntimeError: No rank can continue.
            KeyboardInterrupt: The run was stopped, or another rank has failed.
        """
        if ready():
            return
        own = RankContext()
        self._base.put_back()
        with self._turn:
            self._waiting[rank] = (ready, what)
            self._pass_on(rank)
            self._turn.wait_for(lambda: self._now == rank)
            del self._waiting[rank]
        own.put_back()
        if ready():
            return
        if self._stopped:
            raise KeyboardInterrupt
        raise RuntimeError(self._trouble)

    def stop(self) -> None:
        """Have every rank that waits raise `KeyboardInterrupt`; from any thread."""
        with self._turn:
            self._stopped = True

    def wait_for_end(self, timeout_s: float) -> bool:
        """Wait at most this long; return whether all ranks have ended."""
        with self._turn:
            return self._turn.wait_for(lambda: not self._left, timeout_s)

    def _pass_on(self, rank: int) -> None:
        """Give the turn to the next rank that can run."""
        place = self.ranks.index(rank) + 1
        order = [each for each in (*self.ranks[place:], *self.ranks[:place]) if each in self._left]
        runnable = [each for each in order if each not in self._waiting or self._waiting[each][0]()]
        if order and not runnable and not self._stopped and not self._trouble:
            waits = "; ".join(f"rank {each} {self._waiting[each][1]}" for each in sorted(order))
            ended = [each for each in self.ranks if each not in self._left]
            gone = f"; ended: {', '.join(map(str, ended))}" if ended else ""
            self._trouble = f"no rank can continue: {waits}{gone}."
        if order:
            self._now = (runnable or order)[0]
        self._turn.notify_all()
