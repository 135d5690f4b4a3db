"""Ends worker groups that have GPUs, keep nothing and are not used. Runs in the agent's loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jupyter_distrib.agent.groups.state import NodeGroupState as State
from jupyter_distrib.agent.groups.worker_group import NodeWorkerGroup
from jupyter_distrib.system.event_loop import Loop

LOOKS = 10
"""Number of looks in the time after which GPUs are given back: nobody notices a tenth of it."""
MAX_TICK_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """The state of a worker group when it was first found idle."""

    since_s: float
    ran_s: float


class IdleGpus:
    """Ends the worker groups of one agent that hold GPUs for nothing.

    Args:
        groups: The worker groups of this agent; a live view.
        end: Ends a worker group that was idle for these seconds.
    """

    def __init__(
        self, loop: Loop, groups: Sequence[NodeWorkerGroup], end: Callable[[NodeWorkerGroup, float], None]
    ) -> None:
        self._loop, self._groups, self._end = loop, groups, end
        self._limits_s: dict[NodeWorkerGroup, float] = {}
        self._seen: dict[NodeWorkerGroup, _Seen] = {}
        self._ticking = False

    def watch(self, group: NodeWorkerGroup, limit_s: float) -> None:
        """End this worker group when it has been idle for the limit; never, if the limit is 0."""
        if limit_s and group.gpus:
            self._limits_s[group] = limit_s
            self._tick_later()

    def _tick_later(self) -> None:
        if not self._ticking and self._limits_s:
            self._ticking = True
            self._loop.later(min(MAX_TICK_S, min(self._limits_s.values()) / LOOKS), self._tick)

    def _tick(self) -> None:
        self._ticking = False
        self._limits_s = {group: limit_s for group, limit_s in self._limits_s.items() if group in self._groups}
        self._seen = {group: seen for group, seen in self._seen.items() if group in self._limits_s}
        now_s = time.monotonic()
        for group, limit_s in list(self._limits_s.items()):
            seen = self._seen.get(group)
            if group.state is State.STARTING or not group.idle or group.kept:
                self._seen.pop(group, None)
            elif seen is None or seen.ran_s != group.ran_s:  # a cell has run since
                self._seen[group] = _Seen(since_s=now_s, ran_s=group.ran_s)
            elif now_s - seen.since_s >= limit_s:
                self._end(group, limit_s)
        self._tick_later()
