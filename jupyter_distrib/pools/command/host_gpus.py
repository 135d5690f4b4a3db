"""The GPUs of a host as a plan of ranks needs them: how many there are, and who has them. Runs in the relay there."""

from __future__ import annotations

import os
from dataclasses import dataclass

from jupyter_distrib.agent.gpus import devices, inventory
from jupyter_distrib.agent.gpus.leases import holder_elsewhere


@dataclass(frozen=True, slots=True, kw_only=True)
class HostGpus:
    """The GPUs of a host, as far as its users may see them."""

    names: tuple[str, ...] = ()
    """Name of each."""
    holders: tuple[str, ...] = ()
    """Holder of each that is of the requested type; empty for one that is free."""

    @property
    def free(self) -> int:
        return self.holders.count("")


def look(gpu_type: str) -> dict[str, tuple[str, ...]]:
    """Return the fields of `HostGpus`, with the driver's answers of now; blocks for as long as it takes."""
    words = os.environ.get("CUDA_VISIBLE_DEVICES")
    chosen = None if words is None else tuple(filter(None, words.split(",")))
    try:
        found = devices.visible(inventory.read_now().gpus, chosen)
    except devices.UnknownDevice:  # the agent says so
        found = []
    fitting = devices.of_type(found, gpu_type) if gpu_type else found
    return {"names": tuple(gpu.name for gpu in found), "holders": tuple(map(holder_elsewhere, fitting))}
