"""Starts the processes of one worker group's ranks. Runs in the agent's loop."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from jupyter_distrib.agent.gpus.devices import Gpu
from jupyter_distrib.agent.ranks.forkservers import Forkservers
from jupyter_distrib.agent.ranks.rank import Rank, RankOwner
from jupyter_distrib.system import control_groups, open_files, reap
from jupyter_distrib.system.event_loop import Loop
from jupyter_distrib.system.launch import AGENT, HASHED_ALIKE
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.descriptors import Descriptors

FORK_AT_ONCE = 60
"""Maximum number of ranks in one order: each needs four descriptors, and one message can carry about 250."""


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
        """Callback for ranks whose process could not be started, with the reason."""
        self._command, self._gpus, self._loop, self._forkservers = command, tuple(gpus), loop, forkservers
        self._overlay = overlay
        self._owner, self._sweep = owner, reap.Sweep(loop)
        self._count = 0
        self._cores = control_groups.cores()

    def resize(self, command: m.OpenWorkerGroup, gpus: Sequence[Gpu]) -> None:
        """Switch to ranks for a worker group of another size."""
        self._command = command
        self.use_gpus(gpus)

    def use_gpus(self, gpus: Sequence[Gpu]) -> None:
        self._gpus = tuple(gpus)

    def prepare(self, local_rank: int) -> Rank:
        """Create a rank without a process yet: messages posted now are the first that its process reads."""
        self._count += 1
        order = worker_order(self._command, local_rank, self._count, self._gpus, self._cores)
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
            pid = _launch_program(rank, self._command.load_env)
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
        for rank, pid in zip(ranks, pids, strict=True):  # one message has both lists: see `Fork` and `Forked`
            rank.process.pid, rank.process.expected = pid, False
            self.on_started(rank)

    def _failed(self, ranks: Sequence[Rank], reason: str) -> None:
        for rank in ranks:
            rank.process.expected = False
        self.on_failed(ranks, reason)


def worker_order(
    command: m.OpenWorkerGroup, local_rank: int, count: int, gpus: Sequence[Gpu], cores: int
) -> m.WorkerOrder:
    """Return the order that starts one rank of a worker group.

    Args:
        command: The command that asked for the worker group.
        local_rank: Number of the rank on this node.
        count: Number of ranks started for this worker group so far, including this one: a replacement is a new worker.
        gpus: GPUs of the worker group, one for each local rank; none for CPU ranks.
        cores: Number of cores of this node that its ranks share.
    """
    size = command.size
    return m.WorkerOrder(
        group=command.group,
        worker=f"{command.group}.{local_rank}.{count}",
        agent_pid=os.getpid(),
        agent=os.environ.get(AGENT, ""),
        rank=command.first_rank + local_rank,
        world_size=command.world_size or size,
        local_rank=local_rank,
        local_world_size=size,
        node_rank=command.node_rank,
        interface=command.interface,
        device=_device(local_rank, gpus),
        visible_devices=_visible(local_rank, gpus, replaced=count > size),
        gpu_addresses=tuple(gpu.address for gpu in gpus),
        threads=max(1, cores // size),
    )


def _visible(local_rank: int, gpus: Sequence[Gpu], *, replaced: bool) -> str | None:
    """Return the rank's CUDA_VISIBLE_DEVICES: the GPUs of all ranks, so that they reach one another; with MIG slices
    only its own, since CUDA shows a process no more than one.

    A rank that replaces another has UUIDs there: if the driver has lost a GPU since, numbers have moved.
    """
    if not gpus:
        return None
    own = gpus[local_rank]
    if own.slice is not None:
        return own.uuid
    return ",".join(gpu.lasting_name if replaced else gpu.called for gpu in gpus if gpu.slice is None)


def _device(local_rank: int, gpus: Sequence[Gpu]) -> str:
    if not gpus:
        return "cpu"
    whole = [gpu for gpu in gpus if gpu.slice is None]
    own = gpus[local_rank]
    return f"{own.kind}:{whole.index(own) if own in whole else 0}"


def _launch_program(rank: Rank, load_env: dict[str, str]) -> int:
    """Start a rank as a program of its own, for variables that are read when a program loads; return its process id."""
    env = {**HASHED_ALIKE, **os.environ, **load_env}
    with Descriptors(rank.descriptors.take()) as fds:
        process = subprocess.Popen(
            [sys.executable, "-m", "jupyter_distrib.worker.process.standalone", *map(str, fds)],
            pass_fds=tuple(fds),
            env=env,
            cwd="/",
        )
    process.returncode = 0  # the loop reaps it, not subprocess
    return process.pid
