"""Lets the other ranks go on for a moment after the first exception, so that ranks that fail alike all report theirs.
Runs in the agent's loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from jupyter_distrib.system.process import state_and_cpu_s

GRACE_S = 0.1
"""Seconds of the moment."""
LIMIT_S = 1.0
"""Seconds of it on a machine that is too busy to let every rank run."""


class FailureGrace:
    """The moment after the first exception of one run.

    Args:
        pids: Returns the processes of the ranks that still execute the cell.
        later: Calls a function after some seconds, unless the run has ended by then.
        on_over: Called when the moment is over.
    """

    def __init__(
        self,
        *,
        pids: Callable[[], Sequence[int]],
        later: Callable[[float, Callable[[], None]], None],
        on_over: Callable[[], None],
    ) -> None:
        self._pids, self._later, self._on_over = pids, later, on_over
        self._had_s: dict[int, float] = {}
        """CPU time in s that each process had had at the first exception."""
        self._until_s = 0.0
        """Time of the end at the latest; 0 before the first exception."""

    def begin(self) -> None:
        """Begin at the first exception; further ones change nothing."""
        if not self._until_s:
            self._until_s = time.monotonic() + LIMIT_S
            self._had_s = {pid: state_and_cpu_s(pid)[1] for pid in self._pids()}
            self._later(GRACE_S, self._look)

    def _look(self) -> None:
        if time.monotonic() < self._until_s and any(map(self._starves, self._pids())):
            self._later(GRACE_S, self._look)
        else:
            self._on_over()

    def _starves(self, pid: int) -> bool:
        """Return whether a process that could execute has not had half of the moment since the first exception."""
        state, cpu_s = state_and_cpu_s(pid)
        return state == "R" and cpu_s - self._had_s.get(pid, 0.0) < GRACE_S / 2
