"""Makes the process groups of one worker group fit after a run that did not end well. Runs in the agent's loop.

CPU ranks have a new store at once, and make their groups anew when next needed. Ranks with devices report first how far
they came (`drain_reports.py`), and keep their groups if that is equally far.
"""

from __future__ import annotations

from collections.abc import Callable

from jupyter_distrib.agent.group_store import GroupStore
from jupyter_distrib.agent.rank_table import RankTable
from jupyter_distrib.agent.run import NodeRun
from jupyter_distrib.wire.messages import DeviceDrained, KeepGroups


class GroupRepair:
    """The repair of the process groups of one worker group.

    Args:
        on_ready: Called when the groups stay, and the ranks are ready for a cell.
    """

    def __init__(self, ranks: RankTable, store: GroupStore, on_ready: Callable[[], None]) -> None:
        self._ranks, self._store, self._on_ready = ranks, store, on_ready
        self._undecided: NodeRun | None = None
        """Run after which reports are awaited."""

    def begin(self, run: NodeRun) -> None:
        """Repair the groups after this run."""
        if any(rank.has_device for rank in self._ranks):
            self._undecided = run
            self._decide(run)
        else:
            self._store.renew()

    def take(self, report: DeviceDrained, current: NodeRun | None) -> None:
        """Take a report, of the current run or of the one before."""
        run = current or self._undecided
        if run is not None and run.command.run == report.run:
            run.drains.take(report)
            if run is self._undecided:
                self._decide(run)

    def cancel(self) -> None:
        """Await nothing more: the store is renewed in any case."""
        self._undecided = None

    def _decide(self, run: NodeRun) -> None:
        if not run.drains.complete:
            return
        self._undecided = None
        if not run.groups_can_stay:
            return self._store.renew()
        for rank in self._ranks:
            rank.post(KeepGroups())
            rank.state = "idle"
        self._on_ready()
