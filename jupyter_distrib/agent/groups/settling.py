"""Limits the time that ranks have to be ready for the next cell after a run that did not end well. Runs in the agent's
loop.
"""

from __future__ import annotations

from functools import partial

from jupyter_distrib.agent.ranks.rank import Rank
from jupyter_distrib.system.event_loop import Loop, Timer

LIMIT_S = 20.0
"""Seconds after which such a rank is killed and replaced. A rank that NCCL does not let go of ends by itself sooner."""


class Settling:
    """The ranks of one worker group that will say `DeviceSettled`, or hear `KeepGroups`, before they are ready."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._timers: dict[Rank, Timer] = {}

    def begin(self, rank: Rank) -> None:
        """Have the next cell wait for a rank, but not for ever."""
        rank.state = "starting"
        self.over(rank)
        self._timers[rank] = self._loop.later(LIMIT_S, partial(self._end, rank))

    def over(self, rank: Rank) -> None:
        """Limit nothing more: the rank is ready, or gone."""
        if (timer := self._timers.pop(rank, None)) is not None:
            timer.cancel()

    def close(self) -> None:
        for rank in list(self._timers):
            self.over(rank)

    def _end(self, rank: Rank) -> None:
        self.over(rank)
        rank.process.kill()
