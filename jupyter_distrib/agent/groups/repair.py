"""Repairs the process groups of one worker group after a run that failed. Runs in the agent's loop.

CPU ranks have a new store at once, and make their groups anew when next needed. Ranks with devices report first how
far they came (`server/group_health.py`), and keep their groups if that is equally far. Where ranks of other nodes
belong to the worker group, the coordinator decides for all of them (`coordinator/group_repair.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from jupyter_distrib.agent.groups.rank_table import RankTable
from jupyter_distrib.agent.groups.store import GroupStore
from jupyter_distrib.agent.runs.run import NodeRun
from jupyter_distrib.server.worker_group import Emit
from jupyter_distrib.system.event_loop import Loop, Timer
from jupyter_distrib.wire import messages as m

REPORT_LIMIT_S = 5.0
"""Seconds to wait for the ranks' reports after the end of a run; they wait for their devices for less."""


class GroupRepair:
    """The repair of the process groups of one worker group.

    Args:
        emit: Sends an event to the coordinator.
        on_ready: Called when the groups stay, and the ranks are ready for a cell.
    """

    def __init__(
        self, ranks: RankTable, store: GroupStore, *, loop: Loop, emit: Emit, on_ready: Callable[[], None]
    ) -> None:
        self._ranks, self._store, self._emit, self._on_ready = ranks, store, emit, on_ready
        self._loop = loop
        self._limit: Timer | None = None
        self.last: NodeRun | None = None
        """The last run that has ended; remote ends of its connections may still have to be cut."""
        self._undecided: NodeRun | None = None
        """The run after which it is undecided whether the ranks keep their process groups."""

    def start(self, run: NodeRun) -> None:
        """Repair the groups after this run, if they need it."""
        self.cancel()
        spans_nodes = self._store.spans_nodes
        if any(rank.has_device for rank in self._ranks) and (spans_nodes or not run.health.fit):
            self._undecided = run
            self._limit = self._loop.later(REPORT_LIMIT_S, self._wait_no_longer)
            self._decide(run)
        elif not (spans_nodes or run.health.fit):
            self._store.renew()

    def on_report(self, report: m.DeviceProgress, current: NodeRun | None) -> None:
        """Handle a report on the current run or the previous one."""
        run = current or self._undecided
        if run is not None and run.command.run == report.run and report.rank in run.progress_reports.awaited:
            run.progress_reports.record(report.rank, finished=report.finished, sequences=(report.sequence,))
            if run is self._undecided:
                self._decide(run)

    def keep(self, command: m.KeepNodeGroups) -> None:
        """Keep the groups, as the coordinator has decided, unless a rank has been replaced meanwhile."""
        if self._undecided is not None and self._undecided.command.run == command.run:
            self._keep()

    def cancel(self) -> None:
        """Stop waiting for reports, because the store is renewed in any case."""
        self._undecided = None
        self._stop_timer()

    def _stop_timer(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    def _wait_no_longer(self) -> None:
        if (run := self._undecided) is not None and run.progress_reports.awaited:
            run.progress_reports.record_silence()
            self._decide(run)

    def _decide(self, run: NodeRun) -> None:
        """Decide, or report to the coordinator, once all ranks have reported."""
        if run.progress_reports.awaited:
            return
        self._stop_timer()
        finished = run.progress_reports.all_finished and not run.cut_any
        if self._store.spans_nodes:
            if not run.health.clean:
                sequences = tuple(run.progress_reports.sequences | run.health.sequences)
                group, name = run.command.group, run.command.run
                self._emit(m.NodeProgress(group=group, run=name, finished=finished, sequences=sequences), ())
        elif finished and run.is_on_all and run.progress_reports.equal(run.health.sequences):
            self._keep()
        else:
            self._undecided = None
            self._store.renew()

    def _keep(self) -> None:
        self._undecided = None
        for rank in self._ranks:
            rank.post(m.KeepGroups())
            rank.state = "idle"
            self._store.resets.stop_waiting(rank)
        self._on_ready()
