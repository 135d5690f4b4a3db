"""The last runs of this notebook. From any thread of the kernel."""

from __future__ import annotations

import itertools
import threading

from jupyter_distrib.errors import PoolError
from jupyter_distrib.kernel.session.runs.run import Run

KEPT = 20
"""Number of runs to remember; more only if more are in progress."""


class RunHistory:
    """The last runs, and all that are in progress."""

    def __init__(self) -> None:
        self.all: tuple[Run, ...] = ()
        """The runs, oldest first; replaced, never mutated, so that any thread may read them."""
        self._lock = threading.Lock()

    def add(self, run: Run) -> None:
        """Remember a run, and forget the oldest that have ended."""
        with self._lock:
            surplus = max(0, len(self.all) + 1 - KEPT)
            gone = set(itertools.islice((each for each in self.all if each.done()), surplus))
            self.all = (*[each for each in self.all if each not in gone], run)

    def remove(self, run: Run) -> None:
        """Forget a run."""
        with self._lock:
            self.all = tuple(each for each in self.all if each is not run)

    def last(self, name: str | None, *, detached: bool = False) -> Run | None:
        """Return the last run with this id or number, or the last of all for None; if `detached`, only detached runs
        count."""
        for run in reversed(self.all):
            if (run.detached or not detached) and (name is None or name in (run.id, run.id.rpartition("-")[2])):
                return run
        return None

    def find(self, name: str | None) -> Run:
        """Return the run with this id or number, or the last one for None. Raises `PoolError`."""
        if (run := self.last(name)) is not None:
            return run
        ids = ", ".join(run.id for run in self.all)
        raise PoolError(
            f"there is no run {name} in this notebook; there are: {ids}." if ids else "nothing has run yet."
        )
