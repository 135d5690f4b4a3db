"""Repairs the process groups of a worker group on several nodes after a run that failed: one decision for the ranks of
all nodes. Runs in the coordinator's loop.

    coordinator <--NodeProgress--- each node on which ranks with GPUs did not end well
        --KeepNodeGroups-->       all nodes, if all devices have finished, equally far
    or  --MakeStore-->            node 0  --GroupsReset--> coordinator --UseStore--> the others --GroupsReset-->

A node that does not answer in time is lost, and the worker group with it. Until the decision is carried out, cells
wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jupyter_distrib.coordinator.run import MultiNodeRun, NodeHandle
from jupyter_distrib.system.event_loop import Loop, Timer
from jupyter_distrib.wire import messages as m

ANSWER_LIMIT_S = 20.0
"""Seconds that nodes have to report, and to make a new store. Agents' own limits are shorter."""


class MultiNodeGroupRepair:
    """The repair of the process groups of one worker group.

    Args:
        group: Its name.
        nodes: Returns its nodes.
        lose: Called with a node that does not answer, and why it matters.
        on_ready: Called when a cell that waits can begin.
    """

    def __init__(
        self,
        group: str,
        *,
        loop: Loop,
        nodes: Callable[[], Sequence[NodeHandle]],
        lose: Callable[[int, str], None],
        on_ready: Callable[[], None],
    ) -> None:
        self._group, self._loop = group, loop
        self._nodes, self._lose, self._on_ready = nodes, lose, on_ready
        self._limit: Timer | None = None
        self._undecided: MultiNodeRun | None = None
        """The run after which it is undecided whether the groups stay."""
        self._stores_awaited = 0
        """Number of stores requested from node 0 that it has not made yet."""
        self._users_awaited: set[int] = set()
        """Nodes that do not use the newest store yet."""
        self._port = 0
        """Port of the newest store."""

    @property
    def under_way(self) -> bool:
        """Return whether cells have to wait."""
        return self._limit is not None

    def start(self, run: MultiNodeRun, *, on_all: bool) -> None:
        """Decide whether the groups stay after this run; `on_all`: whether all ranks have executed it."""
        if run.on_gpus and on_all:
            self._undecided = run
            self._start_timer()
            self._decide()
        else:
            self.make_store()

    def on_report(self, node: int, report: m.NodeProgress, current: MultiNodeRun | None) -> None:
        """Handle a node's report on the current run or the previous one."""
        run = current or self._undecided
        if run is not None and run.command.run == report.run:
            run.progress_reports.record(node, finished=report.finished, sequences=report.sequences)
            self._decide()

    def _decide(self) -> None:
        if (run := self._undecided) is None:
            return
        if not run.progress_reports.equal(run.health.sequences):
            self.make_store()
        elif not run.progress_reports.awaited:
            for node in self._nodes():
                node.send(m.KeepNodeGroups(group=self._group, run=run.command.run))
            self._finish()

    def make_store(self) -> None:
        """Make a new store for all nodes; all ranks abort their groups."""
        if len(self._nodes()) < 2:  # its agent has made a store
            return
        self._undecided = None
        self._stores_awaited += 1
        self._start_timer()
        self._nodes()[0].send(m.MakeStore(group=self._group))

    def on_groups_reset(self, node: int, event: m.GroupsReset) -> None:
        """Handle node 0's answer that there is a new store, or another node's answer that it uses it."""
        if node == 0:
            self._stores_awaited = max(0, self._stores_awaited - 1)
            self._port, self._users_awaited = event.port, set(range(1, len(self._nodes())))
            for other in self._nodes()[1:]:
                other.send(m.UseStore(group=self._group, host=event.host, port=event.port))
        elif event.port == self._port:
            self._users_awaited.discard(node)
        if self._undecided is None and not (self._stores_awaited or self._users_awaited):
            self._finish()

    def cancel(self) -> None:
        """Stop waiting, because the nodes are given back."""
        self._undecided, self._stores_awaited, self._users_awaited = None, 0, set()
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    def _finish(self) -> None:
        waited = self.under_way
        self.cancel()
        if waited:
            self._on_ready()

    def _start_timer(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
        self._limit = self._loop.later(ANSWER_LIMIT_S, self._give_up)

    def _give_up(self) -> None:
        self._limit = None
        if self._undecided is not None:
            silent, what = self._undecided.progress_reports.awaited, "it did not report how far its ranks had come"
        elif self._stores_awaited:
            silent, what = {0}, "it made no new store"
        else:
            silent, what = self._users_awaited, "it did not switch to the new store"
        self._lose(min(silent), f"{what} within {ANSWER_LIMIT_S:.0f} s")
