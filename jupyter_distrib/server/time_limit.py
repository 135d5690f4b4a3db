"""The time limit of one run (`--timeout`); its clock is paused while a rank is stopped in the debugger. Runs in the
loop of the agent or of the coordinator."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from jupyter_distrib.wire import messages as m


class TimeLimit:
    """The time limit of one run.

    Args:
        limit_s: Seconds after which the run is over its limit; None: never.
        later: Calls a function after some seconds, unless the run has ended by then.
        on_over: Called once when the run is over its limit.
    """

    def __init__(
        self,
        limit_s: float | None,
        *,
        later: Callable[[float, Callable[[], None]], None],
        on_over: Callable[[float], None],
    ) -> None:
        self._limit_s, self._later, self._on_over = limit_s, later, on_over
        self._stopped: set[int] = set()
        """Ranks that are stopped in the debugger."""
        self._left_s = limit_s or 0.0
        self._since_s = 0.0
        """Time at which the clock was last started."""
        self._turns = 0
        """Number of times that the clock was started."""
        self._go()

    def on_debugger_event(self, event: m.DebuggerPrompted | m.DebuggerLeft) -> None:
        """Pause or resume the clock, because a rank has stopped in the debugger or left it."""
        if isinstance(event, m.DebuggerLeft):
            return self.on_rank_continued(event.rank)
        if not self._stopped:
            self._left_s -= time.monotonic() - self._since_s
        return self._stopped.add(event.rank)

    def on_rank_continued(self, rank: int) -> None:
        """Record that a rank continues or has ended."""
        if rank not in self._stopped:
            return
        self._stopped.discard(rank)
        if not self._stopped:
            self._go()

    def _go(self) -> None:
        self._since_s = time.monotonic()
        self._turns += 1
        if self._limit_s is not None:
            self._later(max(0.0, self._left_s), partial(self._check, self._turns))

    def _check(self, turn: int) -> None:
        if not self._stopped and turn == self._turns and self._limit_s is not None:
            limit_s, self._limit_s = self._limit_s, None
            self._on_over(limit_s)
