"""Starts the processes of one worker group's ranks. Runs in the agent's loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from jupyter_distrib.agent.gpus.devices import Gpu
from jupyter_distrib.agent.ranks import launch_rank
from jupyter_distrib.agent.ranks.forkservers import Forkservers
from jupyter_distrib.agent.ranks.rank import Rank, RankOwner
from jupyter_distrib.system import control_groups, open_files, reap
from jupyter_distrib.system.event_loop import Loop
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.descriptors import Descriptors

FORK_AT_ONCE = 60
"""Number of ranks in one order: four descriptors for each go with it, and one message takes about 250."""


class RankStarter:
    """The starter of one worker group's ranks: by the forkserver, or as programs of their own.

    Args:
        command: The command that asked for the worker group.
        gpus: GPUs of the worker group, one for each local rank; none for CPU ranks.
        overlay: Folder of packages that the ranks have besides those of their Python; may be empty.
        owner: The worker group.
    """

    def __init__(
        self,
        command: m.OpenWorkerGroup,
        *,
        gpus: Sequence[Gpu],
        overlay: str,
        loop: Loop,
        forkservers: Forkservers,
        owner: RankOwner,
    ) -> None:
        self.on_started: Callable[[Rank], None] = lambda rank: None
        """Callback for each rank that has a process."""
        self.on_failed: Callable[[Sequence[Rank], str], None] = lambda ranks, reason: None
        """Callback for ranks that have none, with the reason."""
        self._command, self._gpus, self._loop, self._forkservers = command, tuple(gpus), loop, forkservers
        self._overlay = overlay
        self._owner, self._sweep = owner, reap.Sweep(loop)
        self._count = 0
        self._cores = control_groups.cores()

    def resize(self, command: m.OpenWorkerGroup, gpus: Sequence[Gpu]) -> None:
        """Start ranks of a worker group of another size from now on."""
        self._command, self._gpus = command, tuple(gpus)

    def prepare(self, local_rank: int) -> Rank:
        """Make a rank without a process: messages posted to it now are the first that its process reads."""
        self._count += 1
        order = launch_rank.order(self._command, local_rank, self._count, self._gpus, self._cores)
        order = replace(order, overlay=self._overlay)
        rank = Rank(order, self._loop, self._sweep, self._owner)
        if self._command.load_env:
            rank.post(m.Fork(orders=(rank.order,)))
        return rank

    def start(self, ranks: Sequence[Rank]) -> None:
        """Start the processes of prepared ranks; one of the two callbacks follows for each."""
        for rank in ranks:
            rank.process.expected = True
        if self._command.load_env:
            for rank in ranks:
                self._start_program(rank)
            return
        for first in range(0, len(ranks), FORK_AT_ONCE):
            self._fork(ranks[first : first + FORK_AT_ONCE])

    def _start_program(self, rank: Rank) -> None:
        try:
            pid = launch_rank.as_program(rank, self._command.load_env)
        except OSError as error:
            return self._failed([rank], f"rank {rank.number} could not be started: {open_files.reason(error)}.")
        self._started([rank], (pid,))

    def _fork(self, ranks: Sequence[Rank]) -> None:
        self._forkservers.fork(
            tuple(rank.order for rank in ranks),
            Descriptors(fd for rank in ranks for fd in rank.descriptors.take()),
            lambda pids: self._started(ranks, pids),
            lambda reason: self._failed(ranks, reason),
        )

    def _started(self, ranks: Sequence[Rank], pids: tuple[int, ...]) -> None:
        for rank, pid in zip(ranks, pids, strict=True):  # one message has both: see `Fork` and `Forked`
            rank.process.pid, rank.process.expected = pid, False
            self.on_started(rank)

    def _failed(self, ranks: Sequence[Rank], reason: str) -> None:
        for rank in ranks:
            rank.process.expected = False
        self.on_failed(ranks, reason)
