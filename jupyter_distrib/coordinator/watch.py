"""Combines, once a second, what the agents of all nodes see of the ranks of one run.

    agents --NodeSawRanks--> MultiNodeWatch --> Stalls --> Stalled, Moved, TimedOut
           <--Probe---

Runs in the coordinator's loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from jupyter_distrib.agent.runs.watch import DEEP_EVERY, TICK_S
from jupyter_distrib.server.diagnose import is_suspicious
from jupyter_distrib.server.stalls import Stalls
from jupyter_distrib.system.event_loop import Loop, Timer
from jupyter_distrib.wire import messages as m


class MultiNodeWatch:
    """The watch over one run.

    Args:
        ranks: Ranks that still execute the cell.
        look_closer: Has all of them look into their process groups.
        tell: Takes the events.
        stop: Stops the run.
    """

    def __init__(
        self,
        command: m.Execute,
        loop: Loop,
        *,
        ranks: Callable[[], set[int]],
        look_closer: Callable[[], None],
        tell: Callable[[m.RunEvent], None],
        stop: Callable[[], None],
    ) -> None:
        self._loop, self._ranks, self._look_closer = loop, ranks, look_closer
        self._stalls = Stalls(command, tell=tell, stop=stop)
        self._looks = {rank: m.RankSighting(rank=rank, state="running") for rank in command.ranks}
        self._ticks = 0
        self._timer: Timer = loop.later(TICK_S, self._tick)

    def close(self) -> None:
        """Stop watching, because the run is over or being stopped."""
        self._timer.cancel()

    def stop_at_a_stall(self) -> None:
        """Stop the run as soon as ranks are seen to wait for one that does not come."""
        self._stalls.limit_s = 0.0

    def handle_event(self, event: m.NodeSawRanks) -> None:
        self._looks |= {look.rank: look for look in event.looks}

    def _tick(self) -> None:
        self._timer = self._loop.later(TICK_S, self._tick)
        self._ticks += 1
        ranks = self._ranks()
        looks = [look if rank in ranks else replace(look, state="left") for rank, look in self._looks.items()]
        if self._ticks % DEEP_EVERY == 0 and is_suspicious(looks):
            self._look_closer()
        self._stalls.judge(looks)
