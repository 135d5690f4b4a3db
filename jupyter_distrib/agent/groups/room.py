"""The requests of a worker group that has ranks: room for more, for a run that grows, and another GPU for a rank whose
own cannot be used any more. Agent's loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from jupyter_distrib.agent.gpus.devices import Gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Room for more ranks on this node."""

    ranks: int = 0
    gpus: tuple[Gpu, ...] = ()
    """The leased GPUs, one for each of them; none for CPU ranks."""


AskRoom: TypeAlias = Callable[[int, int, Callable[[Room], None]], None]
"""A function of the number of further ranks, the number of which it must be a multiple, and the callback that gets
the room."""


FindOtherGpu: TypeAlias = Callable[[Gpu, str, Callable[[Gpu | None, str], None]], None]
"""A function of the GPU on which a rank could not start, the error that it has now met there repeatedly, if any, and
the callback. That gets another GPU, if the first cannot be used and another is free, and why the first cannot be
used."""


def within(there: int, most: int, unit: int) -> int:
    """Return the largest multiple of `unit` that there is room for, up to `most`."""
    size = max(0, min(there, most))
    return size - size % unit
