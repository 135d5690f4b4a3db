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

from jupyter_distrib.agent.gpus.devices import Gpu
from jupyter_distrib.agent.gpus.inventory import GpuReader
from jupyter_distrib.agent.ranks import exit_info, usage
from jupyter_distrib.agent.ranks.rank import Rank
from jupyter_distrib.server.diagnose import is_suspicious
from jupyter_distrib.server.stalls import Stalls
from jupyter_distrib.system.event_loop import Loop, Timer
from jupyter_distrib.wire import messages as m

FIRST_S = 0.3
TICK_S = 1.0
IDLE_SHARE = 0.2
"""Share of a core below which a rank counts as idle: torch's own threads poll."""
STARVED_SHARE = 0.5
"""Share of a core below which a rank with a runnable thread counts as starved: C code that computes gets more."""
SILENT_S = 2.0
"""Seconds without an answer after which a rank counts as silent: C code or an overloaded machine holds up its control
thread."""
LATE_S = 0.5
"""Seconds by which a tick may be late without anything being made of it."""
DEEP_EVERY = 3
"""Number of ticks between deep probes of all ranks while some wait."""


class Watch:
    """The watch over one run on this node.

    Args:
        ranks: The ranks that still execute the cell, by number.
        gpus: For each number, its GPU as it was leased; empty for CPU ranks.
        emit: Takes the events.
        stop: Stops the run.
    """

    def __init__(
        self,
        command: m.Execute,
        loop: Loop,
        *,
        ranks: Callable[[], Mapping[int, Rank]],
        gpus: Mapping[int, Gpu],
        emit: Callable[[m.Event], None],
        stop: Callable[[], None],
    ) -> None:
        self._command, self._loop, self._ranks, self._emit = command, loop, ranks, emit
        self._sampler = UsageSampler(command.run, gpus)
        self._stalls = Stalls(command, emit=emit, stop=stop)
        self._closer = False
        """Whether the coordinator has asked for a deep probe at the next tick."""
        self._seen: dict[int, m.ProbeAnswer] = {}
        self._asked_s: dict[int, float] = {}
        """Time of each rank's unanswered probe."""
        self._asked_cpu_s: dict[int, float] = {}
        """CPU time of each of those ranks at that moment."""
        self._ticks = 0
        self._due_s = time.monotonic() + FIRST_S
        self._timer: Timer = loop.later(FIRST_S, self._tick)

    def close(self) -> None:
        """Stop watching, because the run is over."""
        self._timer.cancel()
        self._sampler.close()

    def on_answer(self, event: m.ProbeAnswer) -> None:
        """Handle a rank's answer to a probe."""
        self._asked_s.pop(event.rank, None)
        self._seen[event.rank] = event

    def probe_deeply(self) -> None:
        """Probe deeply at the next tick, because ranks of other nodes seem to wait for ranks of this one."""
        self._closer = True

    def stop_at_a_stall(self) -> None:
        """Stop the run as soon as ranks are found waiting for one that will not come."""
        self._stalls.limit_s = 0.0

    def _tick(self) -> None:
        if (late_s := time.monotonic() - self._due_s) > LATE_S:  # the agent itself was held up: answers may lie unread
            self._asked_s = {number: asked_s + late_s for number, asked_s in self._asked_s.items()}
        self._due_s = time.monotonic() + TICK_S
        self._timer = self._loop.later(TICK_S, self._tick)
        self._ticks += 1
        ranks = self._ranks()
        for number, rank in ranks.items():
            if (sampled := self._sampler.sample(number, rank, self._seen.get(number))) is not None:
                self._emit(sampled)
        looks = [self._sighting(number, ranks.get(number)) for number in self._command.ranks]
        if self._command.run_size:
            self._emit(m.NodeSawRanks(run=self._command.run, looks=tuple(looks)))
            deep, self._closer = self._closer, False
        else:
            self._stalls.judge(looks)
            deep = self._ticks % DEEP_EVERY == 0 and is_suspicious(looks)
        for number, rank in ranks.items():
            self._ask(number, rank, deep=deep)

    # ------------------------------------------------------------------------------------------------ who waits

    def _sighting(self, number: int, rank: Rank | None) -> m.RankSighting:
        if rank is None:
            return m.RankSighting(rank=number, state="left", seen=self._seen.get(number))
        state = self._state(number)
        line, silent_s = None, 0.0
        if state == "silent" and self._is_starved(number, rank):
            state = "starved"
        elif state == "silent":
            silent_s = self._idle_s(number)
            frames = exit_info.frames_in(rank.notes.place)
            lines = [frame.line for frame in frames if frame.filename == self._command.cell.filename]
            line = lines[-1] if lines else None
        return m.RankSighting(
            rank=number, state=state, pid=rank.pid, seen=self._seen.get(number), line=line, silent_s=silent_s
        )

    def _is_starved(self, number: int, rank: Rank) -> bool:
        """Return whether a silent rank waits for a processor, so that nothing is known of C code."""
        elapsed_s, used_s = self._since_asked(number)
        return used_s < STARVED_SHARE * elapsed_s and usage.has_runnable_thread(rank.pid)

    def _idle_s(self, number: int) -> float:
        """Return for how many seconds a silent rank has done nothing; 0 if it computes, which is not a stall."""
        elapsed_s, used_s = self._since_asked(number)
        return elapsed_s if used_s < IDLE_SHARE * elapsed_s else 0.0

    def _since_asked(self, number: int) -> tuple[float, float]:
        """Return the seconds since a rank's unanswered probe, and the CPU time that it has used since."""
        used_s = self._sampler.cpu_s(number) - self._asked_cpu_s[number]
        return time.monotonic() - self._asked_s[number], used_s

    def _state(self, number: int) -> str:
        if halt := self._sampler.halt_of(number):
            return halt
        asked_s = self._asked_s.get(number)
        return "silent" if asked_s is not None and time.monotonic() - asked_s > SILENT_S else "running"

    def _ask(self, number: int, rank: Rank, *, deep: bool) -> None:
        """Ask a rank where it is; not again before it has answered, so that nothing piles up in a rank that cannot."""
        match self._state(number):
            case "running":
                if number not in self._asked_s:
                    self._asked_s[number], self._asked_cpu_s[number] = time.monotonic(), self._sampler.cpu_s(number)
                    rank.post(m.Probe(run=self._command.run, deep=deep))
            case "silent" if self._sampler.is_on_processor(number) and (deep or is_suspicious(self._others(number))):
                # Not when C code waits for the system: the signal would end some of those waits early.
                rank.notes.ask_place(rank.process)

    def _others(self, number: int) -> Sequence[m.RankSighting]:
        return [
            m.RankSighting(rank=other, state="running", seen=seen)
            for other, seen in self._seen.items()
            if other != number and other in self._ranks()
        ]


class UsageSampler:
    """The samples of one run.

    Args:
        run: Its id.
        gpus: For each rank's number, its GPU as it was leased; empty for CPU ranks.
    """

    def __init__(self, run: str, gpus: Mapping[int, Gpu]) -> None:
        self._run, self._gpus = run, gpus
        self._reader: GpuReader | None = None
        self._used: dict[int, tuple[usage.Usage, float]] = {}
        self._halted: set[int] = set()
        """Ranks stopped in two consecutive samples: a profiler stops them only for a moment."""

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()

    def sample(self, number: int, rank: Rank, seen: m.ProbeAnswer | None = None) -> m.Sampled | None:
        """Return what a rank uses now; None if its process is gone. `seen` is its last answer to a probe."""
        used, now_s = usage.read(rank.pid), time.monotonic()
        if used is None:
            return None
        before, before_s = self._used.get(number, (used, now_s))
        self._used[number] = used, now_s
        if used.stopped and before.stopped and now_s > before_s:
            self._halted.add(number)
        elif not used.stopped:
            self._halted.discard(number)
        if self._gpus and self._reader is None:
            self._reader = GpuReader(tuple(self._gpus.values()))
        gpu = self._reader.latest().get(self._gpus[number].uuid) if self._reader else None
        tensors, reserved = (None, None) if seen is None else (seen.tensor_bytes, seen.reserved_bytes)
        used_bytes = None if gpu is None else gpu.of(rank.pid)
        return m.Sampled(
            run=self._run,
            rank=number,
            rss_bytes=used.rss_bytes,
            # A child that ended takes its time with it if nobody waited for it.
            cpu_percent=max(0.0, 100 * (used.cpu_s - before.cpu_s) / (now_s - before_s)) if now_s > before_s else 0.0,
            gpu_memory_bytes=reserved if used_bytes is None else used_bytes,
            gpu_memory_total_bytes=None if gpu is None else gpu.total_bytes,
            gpu_percent=None if gpu is None else gpu.percent,
            gpu_tensor_bytes=tensors,
            gpu_reserved_bytes=reserved,
            times=None if seen is None else seen.times,
            gpu_memory_of_all=gpu is not None and used_bytes is not None and not gpu.lists(rank.pid),
            at_s=now_s,
        )

    def halt_of(self, number: int) -> str:
        """Return `stopped` or `traced` for a rank that was halted; empty for others."""
        if number not in self._halted:
            return ""
        return "traced" if self._used[number][0].state == "t" else "stopped"

    def cpu_s(self, number: int) -> float:
        """Return the CPU time of a rank at its last sample."""
        return self._used[number][0].cpu_s if number in self._used else 0.0

    def is_on_processor(self, number: int) -> bool:
        """Return whether the rank was running when it was last sampled, rather than waiting for the system."""
        return number in self._used and self._used[number][0].state == "R"
