"""Describes the GPUs of this node as values, and selects the GPUs that a notebook names. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

HIDE_ALL = ("-1", "NoDevFiles", "none", "void")
"""Words that, first in CUDA_VISIBLE_DEVICES, hide all GPUs: CUDA stops at them, and schedulers set them for jobs
without GPUs."""


Maker: TypeAlias = Literal["NVIDIA", "AMD", "Intel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """A process that uses a GPU."""

    pid: int
    used_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU, or one MIG slice of a GPU; two readings of the same one are equal, whatever its use at the time."""

    index: int = field(compare=False)
    """Number in NVML's order (PCI bus), which is CUDA's order under CUDA_DEVICE_ORDER=PCI_BUS_ID."""
    slice: int | None = field(default=None, compare=False)
    """Number among the slices of the GPU; None for a whole GPU."""
    uuid: str
    name: str = field(compare=False)
    memory_bytes: int | None = field(compare=False)
    """Memory of the GPU; None where the driver does not report it."""
    used_bytes: int | None = field(compare=False)
    shares_memory: bool = field(default=False, compare=False)
    """Whether its memory is the system's, as on a DGX Spark."""
    processes: tuple[GpuProcess, ...] = field(default=(), compare=False)
    """Processes that the driver reports; in a container it reports none."""
    exclusive: bool = field(default=False, compare=False)
    """Whether one process at a time may use it (compute mode EXCLUSIVE_PROCESS)."""
    address: str = field(default="", compare=False)
    """Address on the PCI bus, as in /sys/bus/pci/devices; empty if unknown."""
    mps: bool = field(default=False, compare=False)
    """Whether an MPS server runs its processes."""
    display: bool = field(default=False, compare=False)
    """Whether a display is attached to it."""
    cuda_word: str = field(default="", compare=False)
    """Name of the GPU in a rank's CUDA_VISIBLE_DEVICES; empty: its UUID."""
    only_by_number: bool = field(default=False, compare=False)
    """Whether it must be a number, as for AMD's and Intel's GPUs, which have no usable UUID."""
    kind: Literal["cuda", "xpu"] = field(default="cuda", compare=False)
    """Torch's name for such devices."""

    @property
    def number(self) -> str:
        """Return the GPU's number as shown to users: `3`, or `3:1` for a slice."""
        return str(self.index) if self.slice is None else f"{self.index}:{self.slice}"

    @property
    def called(self) -> str:
        return self.cuda_word or self.uuid

    @property
    def lasting_name(self) -> str:
        """Return a name for CUDA_VISIBLE_DEVICES that stays valid even after the driver has lost another GPU."""
        return self.called if self.only_by_number else self.uuid


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """The GPUs of this node at one moment."""

    gpus: tuple[Gpu, ...] = ()
    maker: Maker = "NVIDIA"
    left_out: tuple[tuple[str, str], ...] = ()
    """Number of each unusable GPU, and the reason."""
    problem: str = ""
    """Reason why an installed driver lists no GPUs."""
    silent_s: float = 0.0
    """Seconds for which the driver has not answered: the rest is what it has said before."""
    remark: str = ""
    """Remark that the node has a GPU of a kind that ranks cannot use."""
    cuda_driver: int = 0
    """Newest CUDA version that the driver supports, as CUDA counts: 12080 is 12.8; 0: unknown."""


class UnknownDevice(ValueError):
    """Raised for an entry of CUDA_VISIBLE_DEVICES that names no GPU."""


def visible(found: Sequence[Gpu], chosen: tuple[str, ...] | None) -> list[Gpu]:
    """Return the GPUs selected by CUDA_VISIBLE_DEVICES, each once; entries are numbers, (abbreviated) UUIDs, or
    empty.

    Raises:
        UnknownDevice: An entry names no GPU. CUDA would silently use only the GPUs listed before it.
    """
    if chosen is None:
        return list(found)
    out: list[Gpu] = []
    for word in filter(None, map(str.strip, chosen)):
        if word in HIDE_ALL:
            break
        gpu = _named(found, word)
        if gpu is None:
            raise UnknownDevice(word)
        if gpu not in out:
            out.append(gpu)
    return out


def _named(found: Sequence[Gpu], word: str) -> Gpu | None:
    """Return the GPU that an entry names; the number of a GPU divided by MIG means its first slice, as in CUDA."""
    if word.isdecimal():
        return next((gpu for gpu in found if gpu.index == int(word)), None)
    if word.startswith(("GPU-", "MIG-")) and len(word) > len("GPU-"):
        return next((gpu for gpu in found if gpu.uuid.startswith(word)), None)
    return None


def of_type(found: Sequence[Gpu], wanted: str) -> list[Gpu]:
    """Return the GPUs whose name has every word of `wanted`, in any case: `A10` is in `NVIDIA A10`, not in `NVIDIA
    A100-SXM4`."""
    return [gpu for gpu in found if set(_words(wanted)) <= set(_words(gpu.name))]


def types(found: Sequence[Gpu]) -> str:
    """Describe the GPUs by type, for a sentence: `2 NVIDIA A10, 1 NVIDIA L4`; empty without GPUs."""
    names = [gpu.name for gpu in found]
    return ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name.lower())
