"""The room for more ranks that a worker group has got, for a run that grows. Agent's loop."""

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


def within(there: int, most: int, unit: int) -> int:
    """Return the largest multiple of `unit` that there is room for, up to `most`."""
    size = max(0, min(there, most))
    return size - size % unit
