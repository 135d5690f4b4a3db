"""Passes orders on to the debuggers of the ranks of one worker group, and answers for ranks that have ended. Runs in
the agent's loop."""

from __future__ import annotations

import time

from jupyter_distrib.agent.groups.rank_table import RankTable
from jupyter_distrib.server.pending_cell import Tell
from jupyter_distrib.wire import messages as m


class RankDebuggers:
    """The debuggers of the ranks of a worker group.

    Args:
        tell: Sends an event to the kernel.
    """

    def __init__(self, ranks: RankTable, tell: Tell) -> None:
        self._ranks, self._tell = ranks, tell
        self.failed_run = ""
        """The last run if it has failed, so that its ranks keep for a debugger what it has left; else empty."""

    def obey(self, command: m.Debug) -> None:
        """Pass an order on."""
        if command.action == "drop":
            self.failed_run = ""
        rank = self._ranks.current.get(command.rank)
        if rank is not None and rank.state in ("idle", "running"):
            rank.post(command)
        else:
            self.ended(command.rank, command.run)

    def ended(self, rank: int, run: str = "") -> None:
        """Report that a rank has ended, to somebody who examines the failure of a run; by default the last one, if it
        has failed."""
        if not (run := run or self.failed_run):
            return
        gone = f"rank {rank} has ended, and its memory with it."
        self._tell(m.DebuggerLeft(run=run, rank=rank, text=gone, at_s=time.monotonic()), ())
