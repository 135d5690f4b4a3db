"""Queues worker groups that wait for GPUs, because their notebooks asked for it (`--wait`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from jupyter_distrib.server.client import Client
from jupyter_distrib.system.event_loop import Loop, Timer
from jupyter_distrib.wire import messages as m

LOOK_AGAIN_S = 1.0
"""Seconds between attempts: nothing reports when another agent frees a GPU."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Waiting:
    client: Client[Any]
    command: m.OpenWorkerGroup
    until_s: float


class WaitingGroups:
    """The waiting worker groups of one agent.

    Args:
        reopen: Tries again: it opens the worker group, refuses it, or has it wait on.
        tell: Sends an event to a kernel.
    """

    def __init__(
        self,
        loop: Loop,
        reopen: Callable[[Client[Any], m.OpenWorkerGroup], None],
        tell: Callable[[Client[Any], m.WorkerGroupQueued], None],
    ) -> None:
        self._loop, self._reopen, self._tell = loop, reopen, tell
        self._waiting: list[_Waiting] = []
        self._told: dict[str, str] = {}
        """The reason that each worker group was last given, by its name."""
        self._timer: Timer | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, client: Client[Any], command: m.OpenWorkerGroup, reason: str) -> None:
        """Queue a command, and try it again whenever a GPU may have become free, until its time is over. An empty
        reason is not sent."""
        self._waiting.append(_Waiting(client=client, command=command, until_s=time.monotonic() + command.wait_s))
        if reason and reason != self._told.get(command.group):
            self._told[command.group] = reason
            self._tell(client, m.WorkerGroupQueued(group=command.group, reason=reason))
        if self._timer is not None:
            self._timer.cancel()
        soonest_s = min(each.until_s for each in self._waiting) - time.monotonic()
        self._timer = self._loop.later(max(0.0, min(LOOK_AGAIN_S, soonest_s)), self.look_again)

    def statuses(self) -> tuple[m.WaitingStatus, ...]:
        """Return the status of each."""
        return tuple(
            m.WaitingStatus(
                holder=each.client.hello.label if each.client.hello else "",
                ranks=each.command.ranks(),
                gpus=each.command.gpus,
                reason=self._told.get(each.command.group, ""),
            )
            for each in self._waiting
        )

    def over(self, group: str) -> None:
        """Remove a worker group from the queue."""
        self._told.pop(group, None)
        self._waiting = [each for each in self._waiting if each.command.group != group]

    def gone(self, client: Client[Any]) -> None:
        for each in [each for each in self._waiting if each.client is client]:
            self.over(each.command.group)

    def some_are_free(self) -> None:
        """Try again soon, because a GPU was given back."""
        if self._waiting:
            self._loop.soon(self.look_again)

    def look_again(self) -> None:
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            left_s = max(0.0, each.until_s - time.monotonic())
            self._reopen(each.client, replace(each.command, wait_s=left_s))
