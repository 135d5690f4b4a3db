"""Tells the kernel that its nodes will be taken away soon. Runs in the coordinator's loop."""

from __future__ import annotations

import time
from collections.abc import Callable

from jupyter_distrib.system.event_loop import Loop, Timer
from jupyter_distrib.system.formatting import duration

WARNING_S = 300.0
"""Seconds before the end from which on it is told."""


class AllocationEnd:
    """The time at which the engine takes the nodes of a worker group away.

    Args:
        tell: Tells the run that goes on at that moment, if there is one.
    """

    def __init__(self, loop: Loop, tell: Callable[[str], None]) -> None:
        self._loop, self._tell = loop, tell
        self._ends_at_s: float | None = None
        self._timer: Timer | None = None

    def start(self, ends_at_s: float | None) -> None:
        """Take the time, by `time.monotonic`; None if there is no limit."""
        self.cancel()
        self._ends_at_s = ends_at_s
        if ends_at_s is not None and (left_s := ends_at_s - time.monotonic()) > WARNING_S:
            self._timer = self._loop.later(left_s - WARNING_S, lambda: self._tell(self.warning))

    @property
    def warning(self) -> str:
        """A sentence if the end is near; else empty."""
        if self._ends_at_s is None or (left_s := self._ends_at_s - time.monotonic()) > WARNING_S:
            return ""
        return f"the time limit ends these ranks in {duration(max(0.0, left_s))}: save what must stay."

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
