"""Decides when a checkpoint is due, without a message in most calls. Pure.

The calls of all ranks are counted alike. Ranks that write together agree only at some of the calls, the meetings: there
rank 0 decides by its clock whether to save, and at which call the ranks meet next. Each meeting lies halfway to the
time at which the checkpoint is due, as the calls so far let expect, so an interval of a thousand calls has about ten.
"""

from __future__ import annotations


class Schedule:
    """The time of the next checkpoint on rank 0.

    Args:
        every_s: Seconds from one checkpoint to the next; 0: every call is one.
        now_s: The present time.
    """

    def __init__(self, every_s: float, now_s: float) -> None:
        self.every_s = every_s
        self._since_s, self._calls = now_s, 0

    def count(self) -> None:
        """Count a call of `save`."""
        self._calls += 1

    def due(self, now_s: float) -> bool:
        """Return whether to save now: at the call that is nearest to the time, as far as calls are regular."""
        left_s = self.every_s - (now_s - self._since_s)
        return left_s <= self._call_s(now_s) / 2

    def saved(self, now_s: float) -> None:
        """Begin a new interval."""
        self._since_s, self._calls = now_s, 0

    def calls_to_meeting(self, now_s: float) -> int:
        """Return after how many more calls the ranks meet again; at most as many as there were so far, since the first
        calls may have been slow."""
        if not self._calls:
            return 1
        left_s = self.every_s - (now_s - self._since_s)
        half = int(left_s / 2 / max(self._call_s(now_s), 1e-9))
        return max(1, min(half, self._calls))

    def _call_s(self, now_s: float) -> float:
        return (now_s - self._since_s) / self._calls if self._calls else 0.0
