"""The size of a worker group: how many ranks, and on which kind of device. Kernel side; a value without state."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jupyter_distrib.wire.messages import DEFAULT_CPU_RANKS


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSize:
    """The number of ranks that is asked for, and their device; `GroupSize()` is what a pool gives by itself."""

    count: int | None = None
    """None: one rank for each GPU of the pool, or `DEFAULT_CPU_RANKS` where it has none."""
    gpus: bool = True
    """Whether each rank has a GPU, where the pool has any; False: CPU ranks."""
    gpu_type: str = ""
    """Text that the names of the GPUs must contain; empty for any type."""

    def on_cpus(self) -> GroupSize:
        """Return the size that it comes to on a pool without any GPU."""
        return replace(self, count=self.count or DEFAULT_CPU_RANKS, gpus=False)
