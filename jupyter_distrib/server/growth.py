"""Decides when a run is started again with more ranks (`--ranks 2:8`). Runs in the loop of the agent, or of the
coordinator.

    --grow-after is over --> a checkpoint is young --> the worker group has got room --> the ranks are ended
                                                       nobody else waits for it

The room is the worker group's before any rank is ended, so that the change cannot cost the run its present ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from jupyter_distrib.system.event_loop import Timer
from jupyter_distrib.wire import messages as m

YOUNG_PART = 0.1
"""A checkpoint counts as young for this fraction of `--grow-after` ..."""
YOUNG_S = 5.0
"""... and for at least these seconds: that much work is computed again."""
LOOKS = 20
"""Maximum number of checks for room in a span of `--grow-after`; they begin once that time has passed."""


class Growing(Protocol):
    """A worker group that may get more ranks."""

    def find_room(self, size: int, unit: int, then: Callable[[int], None]) -> None:
        """Get room for up to `size` ranks in all, a multiple of `unit`, as far as nobody waits for it; then call `then`
        with the number of ranks that there is room for now, in the loop. The room stays until it is dropped or used."""

    def drop_room(self) -> None:
        """Give the room back."""

    def nodes(self) -> int:
        """Return the number of nodes, with those of the room; 0 on one machine."""

    def stop(self, *, force: bool = False) -> None:
        """End the current cell."""


class Growth:
    """Restarts one run with more ranks when there is room.

    Args:
        command: The command of the first attempt.
        group: The worker group of the run.
        later: Calls a function after some seconds.
        note: Sends a sentence about the run.
    """

    def __init__(
        self,
        command: m.Execute,
        group: Growing,
        *,
        later: Callable[[float, Callable[[], None]], Timer],
        note: Callable[[str], None],
    ) -> None:
        self._group, self._later, self._note = group, later, note
        self._most, self._unit, self._after_s = command.most_ranks, command.rank_unit, command.grow_after_s
        self.room = 0
        """Number of ranks that there is room for, if that is more than the run has; else 0."""
        self.ending = False
        """Whether the ranks are being ended, so that more can begin."""
        self._ranks = 0
        self._changed_s = time.monotonic()
        self._saved_s: float | None = None
        self._looked_s = float("-inf")
        self._asking = self._over = self._has_noted = False
        self._timer: Timer | None = None

    def begin(self, ranks: int) -> None:
        """Begin to look for room, in an attempt with this many ranks."""
        if self._ranks and ranks != self._ranks:
            self._changed_s = time.monotonic()
        self._ranks, self._over, self.ending, self._saved_s = ranks, False, False, None
        self._cancel()
        if ranks == self.room:
            self.room = 0  # the attempt has the room now
        self._drop()
        if ranks < self._most:
            self._timer = self._later(max(0.0, self._due_s - time.monotonic()), self._due)

    def follow(self, event: m.Event) -> None:
        """Handle an event of the run."""
        match event:
            case m.Saved():
                self._saved_s = time.monotonic()
                self._try()
            case m.RanksReduced():
                self.begin(len(event.ranks))
            case m.Returned() | m.Failed() | m.Interrupted() | m.Exited() | m.TimedOut() if not self.ending:
                self.close()

    def close(self) -> None:
        """Stop looking for room in this attempt."""
        self._over, self.ending = True, False
        self._cancel()
        self._drop()

    @property
    def nodes(self) -> int:
        """The number of nodes of the room; 0 on one machine."""
        return self._group.nodes()

    @property
    def age_s(self) -> float:
        """The age of the last checkpoint."""
        return float("inf") if self._saved_s is None else time.monotonic() - self._saved_s

    @property
    def _due_s(self) -> float:
        return self._changed_s + self._after_s

    def _due(self) -> None:
        self._timer = None
        if self._saved_s is None and not self._has_noted:
            self._has_noted = True
            self._note(
                f"cannot grow from {self._ranks} to {self._most} ranks so far: the cell has made no checkpoint with "
                "jupyter_distrib.save in a folder from which it resumes with jupyter_distrib.resume"
            )
        self._try()

    def _try(self) -> None:
        """Grow if there is room, else look for some."""
        now_s = time.monotonic()
        is_young = self.age_s <= max(YOUNG_S, YOUNG_PART * self._after_s)
        if self._over or self.ending or self._asking or not is_young or now_s < self._due_s:
            return
        if self._ranks >= self._most:
            return
        if self.room:
            self.ending = True
            self._group.stop(force=True)
        elif now_s >= self._looked_s + self._after_s / LOOKS:
            self._looked_s, self._asking = now_s, True
            self._group.find_room(self._most, self._unit, self._found)

    def _found(self, size: int) -> None:
        self._asking = False
        if size <= self._ranks:
            return
        self.room = size
        if self._over:
            return self._drop()
        self._try()
        if not self.ending:  # until the next checkpoint, but not for ever
            self._timer = self._later(self._after_s, self._drop)

    def _drop(self) -> None:
        if self.room:
            self.room = 0
            self._group.drop_room()

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
