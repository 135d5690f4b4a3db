"""Watches the ranks of one run, once a second: what they use, whether one is stopped, and which waits for which.

    tick --> usage of each rank                       --> Sampled
         --> Probe to each rank, ProbeAnswer from it  --> Stalls --> Stalled, Moved
                                                      or NodeSawRanks, to a coordinator, which sees other nodes too

Runs in the agent's loop, and only while a cell does. Never ends a rank by itself: only `--hang-timeout` has the whole
run stopped, by the same ladder as the user's Stop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from jupyter_distrib.agent import exit_info, usage
from jupyter_distrib.agent.gpu_usage import GpuReader
from jupyter_distrib.agent.rank import Rank
from jupyter_distrib.server.diagnose import is_suspicious
from jupyter_distrib.server.stalls import Stalls
from jupyter_distrib.system.event_loop import Loop, Timer
from jupyter_distrib.wire.messages import Event, Execute, NodeSawRanks, Probe, ProbeAnswer, RankSighting, Sampled

FIRST_S = 0.3
TICK_S = 1.0
SILENT_S = 2.0
"""Seconds without an answer after which C code, or too many others, hold up a rank's control thread."""
DEEP_EVERY = 3
"""Ticks between closer looks at all ranks while some wait."""


class Watch:
    """The watch over one run on this node.

    Args:
        ranks: The ranks that still execute the cell, by number.
        gpus: For each number, the UUID of its GPU; empty for CPU ranks.
        tell: Takes the events.
        stop: Stops the run.
    """

    def __init__(
        self,
        command: Execute,
        loop: Loop,
        *,
        ranks: Callable[[], Mapping[int, Rank]],
        gpus: Mapping[int, str],
        tell: Callable[[Event], None],
        stop: Callable[[], None],
    ) -> None:
        self._command, self._loop, self._ranks, self._gpus = command, loop, ranks, gpus
        self._tell = tell
        self._stalls = Stalls(command, tell=tell, stop=stop)
        self._closer = False
        """Whether a coordinator wants a closer look at the next tick."""
        self._reader: GpuReader | None = None
        self._used: dict[int, tuple[usage.Usage, float]] = {}
        self._halted: set[int] = set()
        """Ranks that were stopped at two ticks in a row: a profiler stops them for a moment only."""
        self._seen: dict[int, ProbeAnswer] = {}
        self._asked_s: dict[int, float] = {}
        """Time at which each rank was asked something that it has not answered yet."""
        self._ticks = 0
        self._timer: Timer = loop.later(FIRST_S, self._tick)

    def close(self) -> None:
        """Stop watching, because the run is over."""
        self._timer.cancel()
        if self._reader is not None:
            self._reader.close()

    def heard(self, event: ProbeAnswer) -> None:
        self._asked_s.pop(event.rank, None)
        self._seen[event.rank] = event

    def look_closer(self) -> None:
        """Look closer at the next tick, because ranks of other nodes seem to wait for ranks of this one."""
        self._closer = True

    def _tick(self) -> None:
        self._timer = self._loop.later(TICK_S, self._tick)
        self._ticks += 1
        ranks = self._ranks()
        if self._gpus and self._reader is None:
            self._reader = GpuReader(tuple(self._gpus.values()))
        for number, rank in ranks.items():
            self._sample(number, rank)
        looks = [self._look(number, ranks.get(number)) for number in self._command.ranks]
        if self._command.run_size:
            self._tell(NodeSawRanks(run=self._command.run, looks=tuple(looks)))
            deep, self._closer = self._closer, False
        else:
            self._stalls.judge(looks)
            deep = self._ticks % DEEP_EVERY == 0 and is_suspicious(looks)
        for number, rank in ranks.items():
            self._ask(number, rank, deep=deep)

    def _sample(self, number: int, rank: Rank) -> None:
        used, now_s = usage.read(rank.pid), time.monotonic()
        if used is None:
            return
        before, before_s = self._used.get(number, (used, now_s))
        self._used[number] = used, now_s
        if used.stopped and before.stopped and now_s > before_s:
            self._halted.add(number)
        elif not used.stopped:
            self._halted.discard(number)
        gpu = self._reader.latest().get(self._gpus[number]) if self._reader else None
        self._tell(
            Sampled(
                run=self._command.run,
                rank=number,
                rss_bytes=used.rss_bytes,
                cpu_percent=100 * (used.cpu_s - before.cpu_s) / (now_s - before_s) if now_s > before_s else 0.0,
                gpu_memory_bytes=None if gpu is None else gpu.of(rank.pid),
                gpu_memory_total_bytes=None if gpu is None else gpu.total_bytes,
                gpu_percent=None if gpu is None else gpu.percent,
                at_s=now_s,
            )
        )

    # ------------------------------------------------------------------------------------------------ who waits

    def _look(self, number: int, rank: Rank | None) -> RankSighting:
        if rank is None:
            return RankSighting(rank=number, state="left", seen=self._seen.get(number))
        state = self._state(number)
        line = None
        if state == "silent":
            frames = [
                frame for frame in exit_info.frames_in(rank.place) if frame.filename == self._command.cell.filename
            ]
            line = frames[-1].line if frames else None
        return RankSighting(rank=number, state=state, pid=rank.pid, seen=self._seen.get(number), line=line)

    def _state(self, number: int) -> str:
        if number in self._halted:
            return "traced" if self._used[number][0].state == "t" else "stopped"
        asked_s = self._asked_s.get(number)
        return "silent" if asked_s is not None and time.monotonic() - asked_s > SILENT_S else "running"

    def _ask(self, number: int, rank: Rank, *, deep: bool) -> None:
        """Ask a rank where it is; not again before it has answered, so that nothing piles up in a rank that cannot."""
        match self._state(number):
            case "running":
                if number not in self._asked_s:
                    self._asked_s[number] = time.monotonic()
                    rank.post(Probe(run=self._command.run, deep=deep))
            case "silent" if self._used[number][0].state == "R" and (deep or is_suspicious(self._others(number))):
                rank.ask_place()  # not when C code waits for the system: the signal would end some of those waits early

    def _others(self, number: int) -> Sequence[RankSighting]:
        return [
            RankSighting(rank=other, state="running", seen=seen)
            for other, seen in self._seen.items()
            if other != number and other in self._ranks()
        ]
