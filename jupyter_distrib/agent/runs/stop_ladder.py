"""Stops a run: SIGINT; 20 ms later the collectives are cut; both again a few times; its children are killed; after 2 s
the rank is. Runs
in the agent's loop.

A rank that is importing a library has longer: half an import would stay in the process. On a busy machine
`torch._dynamo`, which the first optimizer imports, takes seconds.

Ranks with devices have longer until the cut: one that waits for its device goes on when the step is done, with its
groups whole."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from jupyter_distrib.agent.ranks.rank import Rank
from jupyter_distrib.agent.runs.rank_connections import RankConnections
from jupyter_distrib.system import reap
from jupyter_distrib.system.event_loop import Timers
from jupyter_distrib.wire import messages as m

CUT_AFTER_S = 0.02
CUT_DEVICES_AFTER_S = 0.25
AGAIN_AFTER_S = (0.12, 0.4, 1.0)
"""Seconds after which SIGINT is repeated: it then goes to the rank's process group, which frees a rank that waits for
its data loader."""

CHILDREN_AFTER_S = 1.4
"""Seconds after which the child processes of a rank that still runs are killed, before the rank itself is."""
IMPORT_S = 8.0
"""Maximum seconds for a rank that is importing a library."""
_NEWS_S = 1.0
"""Seconds without a further report after which a rank that was importing counts as hanging."""
_LOOK_AGAIN_S = 0.5


class StopLadder:
    """The ladder of one run.

    Args:
        run: Its id.
        running: Returns the ranks that still execute the cell.
        connections: The connections to cut.
        timers: Cancelled when the run is over.
    """

    def __init__(
        self, run: str, running: Callable[[], Sequence[Rank]], connections: RankConnections, timers: Timers
    ) -> None:
        self._run, self._running, self._connections, self._timers = run, running, connections, timers
        self.begun = False
        self._begun_s = 0.0
        self._importing: dict[int, float] = {}
        """Time at which each rank last reported an import, by number."""

    def climb(self) -> None:
        """Start the sequence of steps. Takes effect once."""
        if self.begun:
            return
        self.begun, self._begun_s = True, time.monotonic()
        cut_after_s = CUT_DEVICES_AFTER_S if any(rank.has_device for rank in self._running()) else CUT_AFTER_S
        for delay_s in (0.0, *AGAIN_AFTER_S):
            self._timers.later(delay_s, partial(self._interrupt, whole_group=delay_s > 0))
            self._timers.later(delay_s + cut_after_s, self._cut)
        self._timers.later(CHILDREN_AFTER_S, self._kill_children)
        self._timers.later(m.KILL_AFTER_S, self._kill_unless_importing)

    def postpone(self, rank: int) -> None:
        """Record that a rank is importing a library."""
        self._importing[rank] = time.monotonic()

    def _kill_children(self) -> None:
        """End the processes for which ranks wait, such as loader workers that hang, so that the ranks can stay."""
        for rank in self._running():
            for pid in reap.children(rank.pid):
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)

    def _kill_unless_importing(self) -> None:
        now_s = time.monotonic()
        newest_s = now_s - _NEWS_S if now_s < self._begun_s + IMPORT_S else now_s
        for rank in self._running():
            if self._importing.get(rank.number, 0.0) < newest_s:
                rank.process.kill()
        if self._importing:
            self._timers.later(_LOOK_AGAIN_S, self._kill_unless_importing)

    def kill(self) -> None:
        """Go straight to the last step."""
        self.begun = True
        for rank in self._running():
            rank.process.kill()

    def _interrupt(self, *, whole_group: bool) -> None:
        for rank in self._running():
            rank.post(m.CutSockets(run=self._run, inodes=()))
            rank.process.signal(signal.SIGINT, whole_group=whole_group)

    def _cut(self) -> None:
        self._connections.cut(self._running())
