"""A run, as far as this node's ranks execute it. Runs in the agent's loop.

`stop_ladder.py` stops it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence

from jupyter_distrib.agent.gpus.devices import Gpu
from jupyter_distrib.agent.ranks import exit_info
from jupyter_distrib.agent.ranks.output import RunOutput
from jupyter_distrib.agent.ranks.rank import Rank
from jupyter_distrib.agent.runs.rank_connections import RankConnections
from jupyter_distrib.agent.runs.stack_requests import StackRequests
from jupyter_distrib.agent.runs.stop_ladder import StopLadder
from jupyter_distrib.agent.runs.watch import Watch
from jupyter_distrib.server.group_health import GroupHealth, ProgressReports
from jupyter_distrib.server.time_limit import TimeLimit
from jupyter_distrib.server.worker_group import Emit
from jupyter_distrib.system import control_groups
from jupyter_distrib.system.event_loop import Loop, Timers
from jupyter_distrib.system.process import state_and_cpu_s
from jupyter_distrib.wire import endings
from jupyter_distrib.wire import messages as m

GRACE_S = 0.1
"""Grace period after the first exception, in seconds."""
GRACE_LIMIT_S = 1.0
"""Upper limit of the grace period on an overloaded machine, in seconds."""


class NodeRun:
    """One cell being executed.

    Args:
        command: The cell to execute.
        ranks: All ranks of the worker group, by number; a live view.
        loop: The loop of the agent.
        output: Takes what the ranks print.
        emit: Takes events for the notebook.
        spans_nodes: Whether ranks of other nodes take part in it too.
    """

    def __init__(
        self,
        command: m.Execute,
        *,
        ranks: Mapping[int, Rank],
        loop: Loop,
        output: RunOutput,
        emit: Emit,
        spans_nodes: bool,
    ) -> None:
        self.command, self.output, self.emit = command, output, emit
        self.pending = set(command.ranks) & ranks.keys()
        """Ranks that have not reached the end of the cell."""
        self.started_s = time.monotonic()
        self.health = GroupHealth()
        self.progress_reports = ProgressReports()
        self.watch: Watch | None = None
        self._ranks, self._loop, self._timers = ranks, loop, Timers(loop)
        self._connections = RankConnections(command.run, ranks, emit, spans_nodes=spans_nodes)
        self.stacks = StackRequests(
            command.run,
            ranks=lambda: {rank.number: rank for rank in self.running()},
            later=self.later,
            emit=lambda event: emit(event, ()),
        )
        self._ladder = StopLadder(command.run, self.running, self._connections, self._timers)
        self._grace = FailureGrace(
            pids=lambda: [rank.pid for rank in self.running()], later=self.later, on_over=self.stop
        )
        self._time_limit = TimeLimit(command.timeout_s, later=self.later, on_over=self._time_out)

    @property
    def is_on_all(self) -> bool:
        """Return whether all ranks execute the cell."""
        return set(self.command.ranks) == self._ranks.keys()

    @property
    def cut_any(self) -> bool:
        """Return whether connections of its ranks were cut, or process groups aborted."""
        return self._connections.cut_any

    def running(self) -> list[Rank]:
        """Return the ranks that still execute the cell."""
        return [self._ranks[number] for number in self.pending if number in self._ranks]

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        """Call a function later, unless the run has ended by then."""
        self._timers.later(delay_s, call)

    def on_message(self, message: m.Message, fds: tuple[int, ...]) -> None:
        """Handle what a rank reports while it executes the cell."""
        match message:
            case m.ProbeAnswer():
                if self.watch is not None and self.command.run == message.run:
                    self.watch.on_answer(message)
            case m.StopPostponed():
                self._ladder.postpone(message.rank)
            case m.StackSeen():
                if self.command.run == message.run:
                    self.stacks.on_answer(message)
            case _:
                if isinstance(message, m.DebuggerPrompted | m.DebuggerLeft):
                    self._time_limit.on_debugger_event(message)
                self.emit(message, fds)  # type: ignore[arg-type]

    def on_end_of_cell(self, rank: Rank, event: m.Returned | m.Failed | m.Interrupted, fds: tuple[int, ...]) -> None:
        """Handle the end of the cell on a rank, after all that the rank wrote before it."""
        rank.streams.drain()
        self.output.flush()
        self.emit(event, fds)
        self.pending.discard(rank.number)
        if isinstance(event, m.Returned):
            self.health.sequences.add(event.sequence)
            if event.exited_early:
                self.hang_up(rank)
            return
        self.health.clean = False
        if event.awaits_device:
            self.progress_reports.expect(rank.number)
        if isinstance(event, m.Failed) and self.pending:
            self._grace.start()

    def end(self) -> None:
        """Report the end of the run, because every rank has come to the end of the cell."""
        self._timers.cancel()
        self.stop_watching()
        self.output.end()
        ended = m.Ended(
            run=self.command.run,
            at_s=time.monotonic(),
            log_directory=self.output.log_directory,
            clean=self.health.clean,
            sequences=tuple(self.health.sequences),
        )
        self.emit(ended, ())

    def begin_watching(self, gpus: Sequence[Gpu]) -> None:
        """Start to probe the ranks; `gpus` are the worker group's, one for each local rank, if it has any."""
        self.watch = Watch(
            self.command,
            self._loop,
            ranks=lambda: {rank.number: rank for rank in self.running()},
            gpus={rank.number: gpus[rank.order.local_rank] for rank in self.running() if gpus},
            emit=lambda event: self.emit(event, ()),
            stop=self.stop,
        )

    def stop_watching(self) -> None:
        if self.watch is not None:
            self.watch.close()

    def probe_deeply(self) -> None:
        """Look closer, see `Watch.probe_deeply`."""
        if self.watch is not None:
            self.watch.probe_deeply()

    def _time_out(self, limit_s: float) -> None:
        self.emit(m.TimedOut(run=self.command.run, limit_s=limit_s, at_s=time.monotonic()), ())
        self.stop()

    def stop(self, *, force: bool = False) -> None:
        """Climb the ladder, or with `force` its last step at once."""
        self.health.clean = False
        if force:
            return self._ladder.kill()
        if not self._ladder.begun:
            self.stop_watching()  # the stacks from before the stop are the useful ones
        self._ladder.climb()

    def cut_remote_sockets(self, command: m.CutRemoteSockets) -> None:
        """Cut the connections of this node's ranks to ranks of another node that are being stopped, have left or are
        gone."""
        self._connections.cut_remote(command)

    def hang_up(self, rank: Rank) -> None:
        """Cut the connections of a rank that left with `sys.exit()`, as if its process had ended: only ranks that wait
        for it notice."""
        if not (self.pending or self._connections.spans_nodes):
            return
        self.health.clean = False
        if not rank.has_device:
            self._connections.hang_up(rank)
        elif self.watch is not None and not self._connections.spans_nodes:  # else the coordinator stops the ranks
            # NCCL does not notice that a rank has left, and is aborted on all ranks or on none.
            self.watch.stop_at_a_stall()

    def on_rank_lost(
        self, rank: Rank, code: int | None, peak_rss_bytes: int, oom_kills: control_groups.OutOfMemoryKills
    ) -> None:
        """Report the unexpected end of a rank's process, and why. `oom_kills` counts the kills before this run."""
        tail = rank.streams.stderr_tail
        self.output.flush()
        out_of_memory = code == -signal.SIGKILL and oom_kills.grown
        exited = m.Exited(
            run=self.command.run,
            rank=rank.number,
            pid=rank.pid,
            exit_code=code,
            asked=self._ladder.begun and code in (None, -signal.SIGKILL),  # else the process ended by itself
            last_lines=exit_info.last_lines(tail),
            frames=exit_info.crash_frames(tail) if code is not None and exit_info.is_crash(code) else (),
            out_of_memory=out_of_memory,
            memory_limit_bytes=control_groups.memory_limit_bytes() if out_of_memory else 0,
            loading=rank.notes.loading,
            cause=rank.notes.cause,
            peak_rss_bytes=peak_rss_bytes,
            at_s=time.monotonic(),
        )
        self.emit(exited, ())
        self.health.clean = False
        self.pending.discard(rank.number)

    def give_up(self, reason: str) -> None:
        """End the run on every rank now, whatever the ranks are doing, and report that."""
        ranks = sorted(self.running(), key=lambda rank: rank.number)
        for rank in ranks:
            rank.streams.drain()
        self.output.flush()
        pids = {rank.number: rank.pid for rank in ranks}
        for event in endings.exits(self.command.run, pids, asked=True, reason=reason):
            self.emit(event, ())
        self.health.clean = False
        self.pending.clear()


class FailureGrace:
    """The grace period after the first exception of one run, so that ranks that fail alike all report their own.

    Args:
        pids: Returns the processes of the ranks that still execute the cell.
        later: Calls a function after some seconds, unless the run has ended by then.
        on_over: Called when the grace period is over.
    """

    def __init__(
        self,
        *,
        pids: Callable[[], Sequence[int]],
        later: Callable[[float, Callable[[], None]], None],
        on_over: Callable[[], None],
    ) -> None:
        self._pids, self._later, self._on_over = pids, later, on_over
        self._had_s: dict[int, float] = {}
        """CPU time of each process at the first exception, in seconds."""
        self._until_s = 0.0
        """Latest end of the grace period (`time.monotonic`); 0 before the first exception."""

    def start(self) -> None:
        """Start at the first exception; later ones have no effect."""
        if not self._until_s:
            self._until_s = time.monotonic() + GRACE_LIMIT_S
            self._had_s = {pid: state_and_cpu_s(pid)[1] for pid in self._pids()}
            self._later(GRACE_S, self._check)

    def _check(self) -> None:
        if time.monotonic() < self._until_s and any(map(self._starves, self._pids())):
            self._later(GRACE_S, self._check)
        else:
            self._on_over()

    def _starves(self, pid: int) -> bool:
        """Return whether a runnable process has had the CPU for less than half of the grace period."""
        state, cpu_s = state_and_cpu_s(pid)
        return state == "R" and cpu_s - self._had_s.get(pid, 0.0) < GRACE_S / 2
