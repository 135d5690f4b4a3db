"""Samples what the ranks of one run use, and notices those that are stopped. Runs in the agent's loop."""

from __future__ import annotations

import time
from collections.abc import Mapping

from jupyter_distrib.agent.gpus.devices import Gpu
from jupyter_distrib.agent.gpus.usage import GpuReader
from jupyter_distrib.agent.ranks import usage
from jupyter_distrib.agent.ranks.rank import Rank
from jupyter_distrib.wire import messages as m


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
        """Ranks that were stopped at two samples in a row: a profiler stops them for a moment only."""

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
        told = None if gpu is None else gpu.of(rank.pid)
        return m.Sampled(
            run=self._run,
            rank=number,
            rss_bytes=used.rss_bytes,
            cpu_percent=100 * (used.cpu_s - before.cpu_s) / (now_s - before_s) if now_s > before_s else 0.0,
            gpu_memory_bytes=reserved if told is None else told,
            gpu_memory_total_bytes=None if gpu is None else gpu.total_bytes,
            gpu_percent=None if gpu is None else gpu.percent,
            gpu_tensor_bytes=tensors,
            gpu_reserved_bytes=reserved,
            times=None if seen is None else seen.times,
            gpu_memory_of_all=gpu is not None and told is not None and not gpu.lists(rank.pid),
            at_s=now_s,
        )

    def halt_of(self, number: int) -> str:
        """Return `stopped` or `traced` for a rank that was halted; empty for others."""
        if number not in self._halted:
            return ""
        return "traced" if self._used[number][0].state == "t" else "stopped"

    def cpu_s(self, number: int) -> float:
        """Return the processor time that a rank had used when it was last sampled."""
        return self._used[number][0].cpu_s if number in self._used else 0.0

    def is_on_processor(self, number: int) -> bool:
        """Return whether the rank was running when it was last sampled, rather than waiting for the system."""
        return number in self._used and self._used[number][0].state == "R"
