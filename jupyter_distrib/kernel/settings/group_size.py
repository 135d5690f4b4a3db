"""The size of a worker group: the number of ranks and their kind of device. Kernel side; a value without state."""

from __future__ import annotations

from dataclasses import replace

from jupyter_distrib.system.data_class import data_class
from jupyter_distrib.wire import messages as m


@data_class
class GroupSize:
    """The requested number of ranks, and their device; `GroupSize()` stands for the pool's default."""

    count: int | None = None
    """The number of ranks; None: one for each GPU of the pool, 2 if it has none."""
    gpus: bool = True
    """Whether each rank has a GPU, if the pool has any; False: CPU ranks."""
    gpu_type: str = ""
    """The text that the names of the GPUs must contain; empty for any type."""

    def on_cpus(self) -> GroupSize:
        """Return the size that results on a pool without GPUs."""
        return replace(self, count=self.ranks(0), gpus=False)

    def ranks(self, gpus: int) -> int:
        """Return the number of ranks on a pool that has this many GPUs for them."""
        return m.number_of_ranks(self.count or 0, gpus if self.gpus else 0)
