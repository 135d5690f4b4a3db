"""Handles processes that cells leave running when their own parent has ended: they come to the agent, which is a
subreaper. Runs in the agent's loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable

from jupyter_distrib.agent.ranks.rank import Rank
from jupyter_distrib.system import reap
from jupyter_distrib.system.event_loop import Loop

AGAIN_S = 0.05


class BackgroundJobs:
    """Detects processes that a cell left running in the background of a shell (`command &`)."""

    def __init__(self) -> None:
        self._children: frozenset[int] = frozenset()
        """Children of this process, ranks and others, at the last check."""

    def replace_streams(self, ranks: Iterable[Rank], known: Collection[int], run: str) -> None:
        """Give idle ranks new pipes if a new process may hold their old ones, so that its output does not show under
        the next cell.

        Such a process is not a child of its rank, but of this process since the shell has ended.
        """
        children = frozenset(reap.children(os.getpid()))
        new, self._children = children - self._children - set(known), children
        for rank in ranks if new else ():
            if rank.state == "idle" and any(_may_be_of(rank, pid) for pid in new):
                rank.replace_streams(run)


def _may_be_of(rank: Rank, pid: int) -> bool:
    return reap.session_of(pid) == rank.pid or reap.mark_of(pid, reap.WORKER) in (rank.process.mark, None)


class AdoptedProcesses:
    """Kills processes left by dead ranks: children of this process that are neither ranks nor forkservers.

    Args:
        forking: Returns whether ranks are being forked, so that some children may not be registered yet.
        pids: Returns the pids of all ranks.
        sessions: Returns other sessions whose processes are never killed.
        marks: Returns the marks of living ranks.
    """

    def __init__(
        self,
        loop: Loop,
        *,
        forking: Callable[[], bool],
        pids: Callable[[], set[int]],
        sessions: Callable[[], set[int]],
        marks: Callable[[], set[str]],
    ) -> None:
        self._loop, self._forking = loop, forking
        self._pids, self._sessions, self._marks = pids, sessions, marks

    def kill(self, unmarked_before: frozenset[int] = frozenset()) -> None:
        """Kill all processes except those of living ranks. Processes whose owner cannot be told yet are spared at the
        first check and passed to the second as `unmarked_before`."""
        if self._forking():
            self._loop.later(AGAIN_S, self.kill)
            return
        pids, marks = self._pids(), self._marks()
        sessions = pids | self._sessions()
        unmarked: set[int] = set()

        def belongs_to_living(pid: int) -> bool:
            mark = reap.mark_of(pid, reap.WORKER)
            if mark is None and pid not in unmarked_before:
                unmarked.add(pid)
            return reap.session_of(pid) in sessions or mark in marks or pid in unmarked

        reap.kill_adopted(frozenset(pids), belongs_to_living)
        if unmarked:
            self._loop.later(AGAIN_S, lambda: self.kill(frozenset(unmarked)))
