"""Starts the ranks of one worker group: all of them at first, and later replacements for ranks that are gone or
could not be started. Runs in the agent's loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from jupyter_distrib.agent.gpus.devices import Gpu
from jupyter_distrib.agent.groups.rank_table import RankTable
from jupyter_distrib.agent.groups.state import NodeGroupState as State
from jupyter_distrib.agent.groups.store import GroupStore
from jupyter_distrib.agent.ranks.forkservers import Forkservers
from jupyter_distrib.agent.ranks.rank import FDS_PER_RANK, Rank
from jupyter_distrib.agent.ranks.starter import RankStarter
from jupyter_distrib.server.worker_group import Emit
from jupyter_distrib.system import open_files
from jupyter_distrib.system.event_loop import Loop
from jupyter_distrib.wire import messages as m

RESTART_WAITS_S = (0.2, 1.0)
"""Seconds to wait after the first, second ... failed start of a rank: a GPU or a process may be free by then."""
REPORT_S = 0.4
"""Seconds before the first report on starting ranks, and between reports."""


class GroupStart:
    """The starts of one worker group's ranks.

    Args:
        starter: Starts their processes.
        state: Returns the state of the worker group.
        leave_after_s: Seconds after which ranks that are no longer needed are asked to leave.
        before_start: Called before any start: the new store makes a group repair unnecessary.
        on_impossible: Called with a rank that will not be restarted, and the reason.
    """

    def __init__(
        self,
        starter: RankStarter,
        ranks: RankTable,
        store: GroupStore,
        *,
        loop: Loop,
        state: Callable[[], State],
        leave_after_s: float,
        before_start: Callable[[], None],
        on_impossible: Callable[[Rank, str], None],
    ) -> None:
        self.on_unstarted: Callable[[], None] = lambda: None
        """Callback for when ranks of a closed worker group will not get a process after all."""
        self._loop, self._ranks, self._store, self._state = loop, ranks, store, state
        self._before_start, self._on_impossible = before_start, on_impossible
        self._leave_after_s = leave_after_s
        self._failures: dict[int, int] = {}
        """Number of failed starts of each rank since it was last ready."""
        self._starter = starter
        starter.on_started, starter.on_failed = self._started, self._not_started

    def start(self, local_ranks: Iterable[int]) -> None:
        """Start processes for these local ranks, and give the whole worker group a new store; where other nodes belong
        to it, that is up to the coordinator.

        Raises:
            OSError: The agent may not open the files that they need.
        """
        local_ranks = tuple(local_ranks)
        if not open_files.has_room(FDS_PER_RANK * len(local_ranks)):
            raise open_files.error()
        self._before_start()
        ranks = [self._starter.prepare(local_rank) for local_rank in local_ranks]
        for rank in ranks:
            self._ranks.put(rank)
        if self._store.spans_nodes and self._state() is not State.STARTING:
            self._store.hand_on(ranks)
        else:
            self._store.renew()
        self._starter.start(ranks)

    def start_again(self, rank: Rank, reason: str) -> None:
        """Replace a rank that died while starting, unless its restarts are used up or the worker group was never
        open."""
        failures = self._failures[rank.number] = self._failures.get(rank.number, 0) + 1
        if self._state() is State.STARTING or failures > len(RESTART_WAITS_S):
            return self._on_impossible(rank, reason)
        rank.state = "starting"  # a cell waits for the next process
        self._loop.later(RESTART_WAITS_S[failures - 1], lambda: self._replace(rank))

    def has_failed(self, rank: Rank) -> bool:
        """Return whether a start of this rank has failed before the present one, since it was last ready."""
        return rank.number in self._failures

    def use_gpus(self, gpus: Sequence[Gpu]) -> None:
        """Start later ranks on these GPUs, one for each local rank."""
        self._starter.use_gpus(gpus)

    def replace_all(self) -> None:
        """Replace the processes of idle ranks without the notebook noticing."""
        self._ranks.retire_all()
        self.dismiss(self._ranks)
        self.start([rank.order.local_rank for rank in self._ranks])

    def start_resized(self, command: m.OpenWorkerGroup, gpus: Sequence[Gpu]) -> None:
        """Replace the ranks by those of a worker group of another size."""
        self._starter.resize(command, gpus)
        left = [*self._ranks]
        self._ranks.drop_all()
        self.dismiss(left)
        self.start(range(command.size))

    def dismiss(self, ranks: Iterable[Rank]) -> None:
        """Tell ranks that are no longer needed to leave."""
        for rank in ranks:
            rank.dismiss(self._leave_after_s)

    def record_ready(self, rank: Rank) -> None:
        self._failures.pop(rank.number, None)

    def _started(self, rank: Rank) -> None:
        if self._state() is State.CLOSED or not self._ranks.is_current(rank):
            rank.end()

    def _not_started(self, ranks: Sequence[Rank], reason: str) -> None:
        for rank in ranks:
            rank.end()
            if self._ranks.is_current(rank):
                self.start_again(rank, reason)
        if self._state() is State.CLOSED:
            self.on_unstarted()

    def _replace(self, rank: Rank) -> None:
        if self._state() is not State.CLOSED and self._ranks.is_current(rank):
            self.start([rank.order.local_rank])


class StartReports:
    """Reports how many ranks are up until all of them are.

    Args:
        over: Returns whether no more reports are due.
    """

    def __init__(
        self,
        command: m.OpenWorkerGroup,
        ranks: RankTable,
        *,
        loop: Loop,
        forkservers: Forkservers,
        emit: Emit,
        over: Callable[[], bool],
    ) -> None:
        self._command, self._ranks, self._loop, self._forkservers = command, ranks, loop, forkservers
        self._emit, self._over = emit, over
        self._last: m.WorkerGroupStarting | None = None
        loop.later(REPORT_S, self._report)

    def _report(self) -> None:
        if self._over():
            return
        up = sum(rank.state != "starting" for rank in self._ranks)
        importing = not self._forkservers.ready and not self._command.load_env
        waits_for = "the import of torch" if importing else ""
        now = m.WorkerGroupStarting(group=self._command.group, up=up, size=self._command.size, waits_for=waits_for)
        if now != self._last:
            self._last = now
            self._emit(now, ())
        self._loop.later(REPORT_S, self._report)
