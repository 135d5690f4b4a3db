"""The ranks of one worker group on this node: their processes, the run they execute, and what happens when one stops or
dies.

    open -> Ready from all -> WorkerGroupOpened -> Execute -> events ... -> Ended -> (repair) -> Execute -> ...

Runs in the agent's loop. How a run is stopped is in `node_run.py`. A rank that is gone is replaced from the forkserver
while the notebook already has its answer.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from jupyter_distrib.agent import exit_info, launch_rank
from jupyter_distrib.agent.devices import Gpu
from jupyter_distrib.agent.forkservers import Forkservers
from jupyter_distrib.agent.output import RunOutput, write_late
from jupyter_distrib.agent.rank import Rank
from jupyter_distrib.agent.run import NodeRun
from jupyter_distrib.server.pending_cell import PendingCell, Tell
from jupyter_distrib.server.worker_group import WorkerGroupState
from jupyter_distrib.system import control_groups, reap
from jupyter_distrib.system.event_loop import Loop
from jupyter_distrib.wire.link import encode
from jupyter_distrib.wire.messages import (
    CutRemoteSockets,
    Execute,
    Failed,
    Forget,
    Fork,
    GroupsReset,
    Interrupted,
    Message,
    OpenWorkerGroup,
    ProbeAnswer,
    Ready,
    ResetGroups,
    Returned,
    UseStore,
    WorkerGroupChanged,
    WorkerGroupOpened,
    WorkerGroupRefused,
    WorkerInfo,
    Wrote,
)

FAILURE_GRACE_S = 0.1
"""How long the others may go on after the first exception: ranks that fail alike then all tell their own."""
FORK_AT_ONCE = 60
"""Four descriptors for each rank go with the order, and one message takes about 250."""
COUNT_AFTER_S = 0.05
"""Into a run: many are over by then."""
LEAVE_AFTER_S = 0.3
"""CPU ranks that are not needed any more leave the processor to their successors first."""


class NodeWorkerGroup(WorkerGroupState[NodeRun]):
    """The workers that one `OpenWorkerGroup` asked for."""

    def __init__(
        self,
        command: OpenWorkerGroup,
        *,
        loop: Loop,
        forkservers: Forkservers,
        gpus: list[Gpu],
        node_has_gpus: Callable[[], tuple[bool | None, str]],
        notes: tuple[str, ...] = (),
        logs: Path,
        tell: Tell,
    ) -> None:
        super().__init__(command, tell)
        self.gpus = gpus
        self._node_has_gpus, self._notes = node_has_gpus, notes
        self.closed_s = 0.0
        self.on_refused: Callable[[], None] = lambda: None
        """Called to close the worker group."""
        self._loop, self._forkservers, self._logs = loop, forkservers, logs
        self._sweep = reap.Sweep(loop)
        self._ranks: dict[int, Rank] = {}
        self._exchanged: list[Rank] = []
        """Others are in their places, and their exit handlers may still be at work."""
        self._last_output: RunOutput | None = None
        self._opened = False
        self._lost: set[int] = set()
        self._children: frozenset[int] = frozenset()
        """The children of this process, ranks and others, at the last look."""
        self._count_kills()
        self._count = 0

    @property
    def pids(self) -> list[int]:
        return [rank.pid for rank in self._there() if rank.pid]

    @property
    def marks(self) -> set[str]:
        return {rank.order.worker for rank in self._there()}

    @property
    def _leave_after_s(self) -> float:
        return 0.0 if self.gpus else LEAVE_AFTER_S

    @property
    def living(self) -> bool:
        return any(rank.pid and not rank.reaped for rank in self._there())

    @property
    def spans(self) -> bool:
        """Ranks of other nodes belong to it too: whoever holds it together decides when a new store is due."""
        return self.command.world_size > self.command.size

    @property
    def early(self) -> bool:
        """Its ranks may be exchanged for better ones; not one node's alone, whose group the other nodes are in."""
        return not self.spans and any(rank.early for rank in self._ranks.values())

    def infos(self) -> tuple[WorkerInfo, ...]:
        def device(rank: Rank) -> str:
            gpu = self.gpus[rank.order.local_rank] if self.gpus else None
            return f"{gpu.name} (GPU {gpu.number})" if gpu else ""

        return tuple(rank.info(device(rank)) for _, rank in sorted(self._ranks.items()))

    # ------------------------------------------------------------------------------------------------ starting

    def open(self) -> None:
        """Start every rank; `WorkerGroupOpened` or `WorkerGroupRefused` follows."""
        self._start(range(self.command.size))

    def replace_all(self) -> None:
        """New processes for idle ranks, unnoticed by the notebook."""
        self._exchanged = list(self._there())
        for rank in self._ranks.values():
            rank.dismiss(self._leave_after_s)
        self._start(range(self.command.size))

    def _start(self, local_ranks: range | list[int]) -> None:
        """Start processes for these local ranks, and give the whole worker group a new store."""
        ranks = []
        for local_rank in local_ranks:
            self._count += 1
            rank = Rank(
                launch_rank.order(self.command, local_rank, self._count, self.gpus),
                self._loop,
                self._sweep,
                heard=self._heard,
                wrote=self._wrote,
                hung_up=lambda rank: self.lost(rank, None, 0),
            )
            self._ranks[rank.number] = rank
            ranks.append(rank)
            if self.command.load_env:
                rank.post(Fork(orders=(rank.order,)))
        if not self.spans or not self._opened:
            self._reset_groups()
        if self.command.load_env:
            for rank in ranks:
                self._forked([rank], (launch_rank.as_program(rank, self.command.load_env),))
            return
        for first in range(0, len(ranks), FORK_AT_ONCE):
            self._fork(ranks[first : first + FORK_AT_ONCE])

    def _fork(self, ranks: list[Rank]) -> None:
        self._forkservers.fork(
            tuple(rank.order for rank in ranks),
            [fd for rank in ranks for fd in rank.theirs],
            lambda pids: self._forked(ranks, pids),
            self.refuse,
        )

    def _forked(self, ranks: list[Rank], pids: tuple[int, ...]) -> None:
        for rank, pid in zip(ranks, pids, strict=True):
            rank.pid = pid
            if self.closed or self._ranks.get(rank.number) is not rank:
                rank.end()

    def _reset_groups(self) -> None:
        """A new store for whatever groups are made from now on; its socket is bound here and listens in rank 0."""
        if self.command.first_rank:
            return
        with socket.create_server((self.command.host, 0), backlog=1024) as listener:
            port = listener.getsockname()[1]
            for number, rank in self._ranks.items():
                rank.post(ResetGroups(host=self.command.host, port=port), [] if number else [listener.fileno()])
        if self.spans:
            self.tell(GroupsReset(group=self.name, host=self.command.host, port=port), ())

    def make_store(self) -> None:
        """A new store, because ranks of other nodes need one."""
        self._reset_groups()

    def use_store(self, command: UseStore) -> None:
        """The store is on another node."""
        for rank in self._ranks.values():
            rank.post(ResetGroups(host=command.host, port=command.port))

    def refuse(self, reason: str) -> None:
        """Starting failed: end what there is and say why. Once."""
        if self.closed:
            return
        self.on_refused()
        self.tell(WorkerGroupRefused(group=self.name, reason=reason), ())

    def _ready(self, rank: Rank, event: Ready) -> None:
        rank.state, rank.early = "idle", event.early
        if any(other.state == "starting" for other in self._ranks.values()):
            return
        if not self._opened:
            self._opened = True
            exist, problem = self._node_has_gpus()
            self.tell(
                WorkerGroupOpened(
                    group=self.name,
                    workers=self.infos(),
                    gpus=bool(self.gpus),
                    node_has_gpus=exist,
                    gpu_problem=problem,
                    notes=self._notes,
                ),
                (),
            )
        if self._lost:
            lost, self._lost = tuple(sorted(self._lost)), set()
            self.tell(WorkerGroupChanged(group=self.name, workers=self.infos(), lost=lost), ())
        if (pending := self.take_pending()) is not None:
            self.execute(pending.command, pending.fds, pending.tell)

    # ------------------------------------------------------------------------------------------------ running

    def execute(self, command: Execute, fds: list[int], tell: Tell, frame: bytes = b"") -> None:
        """Hand the cell to its ranks, now or when all of them are up. Takes `fds`; `frame` is the command as it
        came."""
        if any(rank.state == "starting" for rank in self._ranks.values()):
            self.pending = PendingCell(command=command, fds=fds, tell=tell)
            return
        for rank in self._ranks.values():
            rank.drain()  # what has come so far is of the run before
        frame = frame or encode(command, len(fds))
        for number in self._ranks.keys() & command.ranks:
            self._ranks[number].state = "running"
            self._ranks[number].post_frame(frame, fds)
        for fd in fds:
            os.close(fd)
        # The rest while they are at it already.
        if self._last_output is not None:
            self._last_output.close()
        run = NodeRun(
            command,
            ranks=self._ranks,
            loop=self._loop,
            output=RunOutput(command.run, self._logs / command.run, self._loop, lambda event: tell(event, ())),
            tell=tell,
            spans=self.spans,
        )
        self.run, self._last_output = run, run.output
        run.later(COUNT_AFTER_S, self._count_kills)
        run.begin_watching(self.gpus)
        if command.timeout_s is not None:
            run.later(command.timeout_s, partial(run.time_out, command.timeout_s))

    def stop(self, *, force: bool = False) -> None:
        """Climb the ladder, or with `force` its last step at once. Does nothing when nothing runs."""
        if (pending := self.take_pending()) is not None:
            pending.cancel()
        elif self.run is not None:
            self.run.stop(force=force)

    def cut_remote_sockets(self, command: CutRemoteSockets) -> None:
        """See `NodeRun.cut_remote_sockets`."""
        if self.run is not None:
            self.run.cut_remote_sockets(command)

    # ------------------------------------------------------------------------------------------------ what ranks say

    def _heard(self, rank: Rank, event: Message, fds: tuple[int, ...]) -> None:
        match event:
            case Ready():
                self._ready(rank, event)
            case Wrote():
                write_late(self._logs, rank.number, event)  # of a thread of an earlier run
            case ProbeAnswer():
                if self.run is not None and self.run.watch is not None and self.run.command.run == event.run:
                    self.run.watch.heard(event)
            case Returned() | Failed() | Interrupted():
                self._ended(rank, event, fds)
            case _:
                if self.run is not None:
                    self.run.tell(event, fds)  # type: ignore[arg-type]

    def _ended(self, rank: Rank, event: Returned | Failed | Interrupted, fds: tuple[int, ...]) -> None:
        """A rank has come to the end of the cell, one way or another."""
        if rank.killed:
            return  # its death is on the way, and must meet this run: the next one is not to begin before it
        run = self.run
        rank.state = "idle"
        if run is None or rank.number not in run.pending:
            return
        rank.drain()
        run.output.flush()
        run.tell(event, fds)
        run.pending.discard(rank.number)
        if isinstance(event, Returned):
            run.sequences.add(event.sequence)
            self.kept |= {f"{event.run}/{name}": time.time() for name in event.kept}
            if event.exited_early:
                run.hang_up(rank)
        else:
            run.clean = False
        if isinstance(event, Failed) and run.pending:
            run.later(FAILURE_GRACE_S, self.stop)
        self._finish_if_over(run)

    def _finish_if_over(self, run: NodeRun) -> None:
        if run.pending or self.run is not run:
            return
        self.run = None
        self.ran_s += time.monotonic() - run.started_s
        run.end()
        self.on_ended(run)
        if not run.clean:
            self._count_kills()
        if not self.closed:
            self._repair(run)
            self._loop.soon(lambda: self._split_from_adopted(run.command.run))  # when the notebook has its answer

    def _repair(self, run: NodeRun) -> None:
        """Make the worker group fit for the next run: replace ranks that are gone, and the store if groups may be
        broken."""
        gone = [rank.order.local_rank for rank in self._ranks.values() if rank.state == "gone"]
        if gone:
            self._start(gone)
        elif not self.spans and (not run.clean or len(run.sequences) > 1):
            self._reset_groups()

    def _split_from_adopted(self, run: str) -> None:
        """Give ranks new pipes if a cell has left something running behind a shell (`command &`). That is no child of
        its rank, but ours since the shell has ended; it keeps the rank's pipes, and must not show under the next
        cell."""
        now = frozenset(reap.children(os.getpid()))
        new, self._children = now - self._children - set(self.pids), now
        for rank in self._ranks.values() if new else ():
            if rank.state == "idle" and any(self._may_be_of(rank, pid) for pid in new):
                rank.split(run)

    def _may_be_of(self, rank: Rank, pid: int) -> bool:
        return reap.session_of(pid) == rank.pid or reap.mark_of(pid, reap.WORKER) in (rank.order.worker, None)

    def _count_kills(self) -> None:
        """Record the OOM-kill count, so that earlier kills are not blamed on this run (slow)."""
        self._oom_kills = control_groups.out_of_memory_kills()

    def _wrote(self, rank: Rank, stream: str, data: bytes) -> None:
        run = self.run
        if run is not None and rank.number in run.command.ranks:
            run.output.write(rank.number, stream, data, show=rank.number in run.pending)
        elif self._last_output is not None:
            self._last_output.write(rank.number, stream, data, show=False)

    # ------------------------------------------------------------------------------------------------ ending

    def find(self, pid: int) -> Rank | None:
        return next((rank for rank in self._there() if rank.pid == pid), None)

    def _there(self) -> Iterator[Rank]:
        """Everyone that may still have a process."""
        yield from self._ranks.values()
        yield from self._exchanged

    def lost(self, rank: Rank, code: int | None, peak_rss_bytes: int) -> None:
        """A rank's process has ended by itself: tell the run, stop the others, replace it."""
        rank.reaped = True
        if rank in self._exchanged:
            self._exchanged.remove(rank)
        if not rank.ended:
            rank.hear_out()
        rank.end()
        number = rank.number
        if self._ranks.get(number) is not rank or self.closed:
            return
        if rank.state == "starting" and not self._opened:
            lines = "\n".join(exit_info.last_lines(rank.stderr_tail))
            return self.refuse(f"rank {number} ended before it was ready (exit code {code}).\n{lines}".rstrip())
        rank.state = "gone"
        self._lost.add(number)
        run = self.run
        if run is not None and number in run.pending:
            run.lost(rank, code, peak_rss_bytes, self._oom_kills)
            self.stop()
            self._finish_if_over(run)
        elif run is None:
            self._start([rank.order.local_rank])
            if self.spans:  # the next cell has to wait until all have met anew, and must know before it begins
                self.tell(WorkerGroupChanged(group=self.name, workers=self.infos(), lost=(number,)), ())

    def forget(self, command: Forget) -> None:
        for key in command.keys:
            self.kept.pop(key, None)
        for rank in self._ranks.values():
            rank.post(command)

    def close(self, *, force: bool, reason: str = "") -> None:
        """End every rank: at once, or after its exit handlers. The run on them ends now, for that reason."""
        self.closed, self.closed_s = True, time.monotonic()
        if self.pending is not None:
            self.pending.cancel()
        if self.run is not None:
            self.run.give_up(reason or "its ranks were stopped")
            self._finish_if_over(self.run)
        for rank in list(self._there()) if force else self._ranks.values():
            if force:
                rank.end()
            else:
                rank.dismiss(self._leave_after_s)
        if self._last_output is not None:
            self._last_output.close()
            self._last_output = None
