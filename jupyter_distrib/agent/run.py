"""A run, as far as this node's ranks execute it, and how it is stopped. Runs in the agent's loop.

The stop ladder: SIGINT; 20 ms later the collectives are cut; both again a few times; after 2 s the rank is killed.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from jupyter_distrib.agent import exit_info
from jupyter_distrib.agent.devices import Gpu
from jupyter_distrib.agent.output import RunOutput
from jupyter_distrib.agent.rank import Rank
from jupyter_distrib.agent.watch import Watch
from jupyter_distrib.server.pending_cell import Tell
from jupyter_distrib.system import control_groups, reap
from jupyter_distrib.system.event_loop import Loop, Timer
from jupyter_distrib.wire import endings
from jupyter_distrib.wire.messages import (
    KILL_AFTER_S,
    Connected,
    CutRemoteSockets,
    CutSockets,
    Ended,
    Execute,
    Exited,
    TimedOut,
)

CUT_AFTER_S = 0.02
AGAIN_AFTER_S = (0.12, 0.4, 1.0)
"""From the second time on, SIGINT goes to the rank's process group, which frees a rank that waits for its data
loader."""


class NodeRun:
    """One cell on its way.

    Args:
        command: What is executed.
        ranks: All of the worker group, by number, as they come and go.
        loop: The agent's.
        output: Takes what the ranks print.
        tell: Takes events for the notebook.
        spans: Ranks of other nodes take part in it too.
    """

    def __init__(
        self,
        command: Execute,
        *,
        ranks: Mapping[int, Rank],
        loop: Loop,
        output: RunOutput,
        tell: Tell,
        spans: bool,
    ) -> None:
        self.command, self.output, self.tell = command, output, tell
        self.pending = set(command.ranks) & ranks.keys()
        """Ranks that have not come to the end of the cell."""
        self.started_s = time.monotonic()
        self.stopping = False
        self.clean = True
        self.sequences: set[int] = set()
        self.watch: Watch | None = None
        self._ranks, self._loop, self._spans = ranks, loop, spans
        self._timers: list[Timer] = []
        self._over = False

    def running(self) -> list[Rank]:
        """The ranks that are still at it."""
        return [] if self._over else [self._ranks[number] for number in self.pending if number in self._ranks]

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        """Unless the run has ended by then."""
        self._timers.append(self._loop.later(delay_s, call))

    def end(self) -> None:
        """Every rank has come to the end, one way or another: tell so."""
        self._over = True
        for timer in self._timers:
            timer.cancel()
        self.stop_watching()
        self.output.flush()
        ended = Ended(
            run=self.command.run,
            at_s=time.monotonic(),
            log_directory=self.output.log_directory,
            clean=self.clean,
            sequences=tuple(self.sequences),
        )
        self.tell(ended, ())

    def begin_watching(self, gpus: Sequence[Gpu]) -> None:
        """Have the ranks asked how they are; `gpus` are the worker group's, one for each local rank, if it has any."""
        self.watch = Watch(
            self.command,
            self._loop,
            ranks=lambda: {rank.number: rank for rank in self.running()},
            gpus={rank.number: gpus[rank.order.local_rank].uuid for rank in self.running() if gpus},
            tell=lambda event: self.tell(event, ()),
            stop=self.stop,
        )

    def stop_watching(self) -> None:
        if self.watch is not None:
            self.watch.close()

    def look_closer(self) -> None:
        """See `Watch.look_closer`."""
        if self.watch is not None:
            self.watch.look_closer()

    def time_out(self, limit_s: float) -> None:
        self.tell(TimedOut(run=self.command.run, limit_s=limit_s, at_s=time.monotonic()), ())
        self.stop()

    def stop(self, *, force: bool = False) -> None:
        """Climb the ladder, or with `force` its last step at once."""
        self.clean = False
        if force:
            return self._kill()
        if self.stopping:
            return
        self.stopping = True
        self.stop_watching()  # where ranks were before they were stopped is what helps
        for delay_s in (0.0, *AGAIN_AFTER_S):
            self.later(delay_s, partial(self._interrupt, whole_group=delay_s > 0))
            self.later(delay_s + CUT_AFTER_S, self._cut)
        self.later(KILL_AFTER_S, self._kill)

    def cut_remote_sockets(self, command: CutRemoteSockets) -> None:
        """Ranks of another node are gone, or on their way: free those here that wait for them."""
        if inodes := reap.sockets_towards(self._pids, command.ends):
            for rank in self.running():
                rank.post(CutSockets(run=command.run, inodes=inodes, stop=False))

    def hang_up(self, rank: Rank) -> None:
        """Shut the connections of a rank that has left with `sys.exit()`, as the end of its process would: who waits
        for it is told, who does not goes on."""
        if not self.pending and not self._spans:
            return
        self.clean = False
        rank.post(CutSockets(run=self.command.run, inodes=reap.sockets_between(self._pids)))
        if self._spans:
            self.tell(Connected(run=self.command.run, ends=reap.ends_outside([rank.pid])), ())

    def lost(self, rank: Rank, code: int | None, peak_rss_bytes: int, oom_kills: int) -> None:
        """A rank's process has ended by itself: tell what is known of it. `oom_kills`: how many there were before."""
        tail = rank.stderr_tail
        self.output.flush()
        out_of_memory = code == -signal.SIGKILL and control_groups.out_of_memory_kills() > oom_kills
        exited = Exited(
            run=self.command.run,
            rank=rank.number,
            pid=rank.pid,
            exit_code=code,
            asked=self.stopping and code in (None, -signal.SIGKILL),  # else it went by itself
            last_lines=exit_info.last_lines(tail),
            frames=exit_info.crash_frames(tail) if code is not None and exit_info.is_crash(code) else (),
            out_of_memory=out_of_memory,
            memory_limit_bytes=control_groups.memory_limit_bytes() if out_of_memory else 0,
            loading=rank.loading,
            peak_rss_bytes=peak_rss_bytes,
            at_s=time.monotonic(),
        )
        self.tell(exited, ())
        self.clean = False
        self.pending.discard(rank.number)

    def give_up(self, reason: str) -> None:
        """Its ranks are being ended, whatever they are at: tell so of each."""
        ranks = sorted(self.running(), key=lambda rank: rank.number)
        for rank in ranks:
            rank.drain()
        self.output.flush()
        pids = {rank.number: rank.pid for rank in ranks}
        for event in endings.exits(self.command.run, pids, asked=True, reason=reason):
            self.tell(event, ())
        self.clean = False
        self.pending.clear()

    @property
    def _pids(self) -> list[int]:
        return [rank.pid for rank in self._ranks.values() if rank.pid]

    def _interrupt(self, *, whole_group: bool) -> None:
        for rank in self.running():
            rank.post(CutSockets(run=self.command.run, inodes=()))
            rank.signal(signal.SIGINT, whole_group=whole_group)

    def _cut(self) -> None:
        inodes = reap.sockets_between(self._pids)
        for rank in self.running():
            rank.post(CutSockets(run=self.command.run, inodes=inodes))
        if self._spans:
            self.tell(Connected(run=self.command.run, ends=reap.ends_outside(self._pids)), ())

    def _kill(self) -> None:
        self.stopping = True
        for rank in self.running():
            rank.kill()
