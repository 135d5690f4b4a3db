"""The things that inline ranks have sent to one another, as data: one step for each collective and each message."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jupyter_distrib.system.formatting import rank_list

MOST_STEPS = 200
SHOWN_NUMBERS = 24
"""Larger tensors are shown by their shape and their first numbers."""
SHOWN_ROWS = 4
CHARACTERS = 30


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor or another object as it is shown."""

    lines: tuple[str, ...]
    shape: str


@dataclass(frozen=True, slots=True)
class Arrow:
    """Value that one rank has sent to another one."""

    source: int
    target: int
    value: Value


@dataclass(slots=True, kw_only=True)
class Step:
    """One collective or message."""

    name: str
    detail: str
    lines: dict[int, int]
    """The line of the cell in which each rank called it."""
    before: dict[int, tuple[Value, ...]]
    after: dict[int, tuple[Value, ...]]
    arrows: list[Arrow] = field(default_factory=list)

    @property
    def title(self) -> str:
        return f"{self.name} ({self.detail})" if self.detail else self.name

    @property
    def place(self) -> str:
        lines = sorted(set(self.lines.values()) - {0})
        return f"line{'s' * (len(lines) > 1)} {', '.join(map(str, lines))}" if lines else ""

    @property
    def sentences(self) -> list[str]:
        """Sentences that tell who sends what to whom, one for each rank and each value that it sends."""
        to: dict[tuple[int, Value], list[int]] = defaultdict(list)
        for arrow in self.arrows:
            to[arrow.source, arrow.value].append(arrow.target)
        return [
            f"rank {source} sends {' '.join(value.lines)}{f' of shape {value.shape}' if value.shape else ''}"
            f" to {rank_list(targets)}"
            for (source, value), targets in to.items()
        ] or ["no data: every rank waits until all are here"]


def value_of(thing: Any) -> Value:
    """Return how a tensor or object is shown."""
    if not hasattr(thing, "shape") or not hasattr(thing, "detach"):
        return Value((_cut(repr(thing)),), "")
    shape = str(list(thing.shape))
    numbers = thing.detach().cpu()
    if numbers.dim() == 0:
        return Value((_number(numbers.item()),), "")
    if numbers.numel() > SHOWN_NUMBERS:
        first = " ".join(_number(each) for each in numbers.flatten()[:3].tolist())
        return Value((_cut(f"[{first} …]"), f"shape {shape}"), shape)
    rows = numbers.reshape(-1, numbers.shape[-1]).tolist() if numbers.numel() else [[]]
    lines = [_cut(f"[{' '.join(_number(each) for each in row)}]") for row in rows]
    more = ["…"] if len(lines) > SHOWN_ROWS else []
    return Value((*lines[:SHOWN_ROWS], *more), shape)


def values_of(things: Sequence[Any]) -> tuple[Value, ...]:
    return tuple(value_of(each) for each in things)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _cut(text: str) -> str:
    return text if len(text) <= CHARACTERS else text[: CHARACTERS - 1] + "…"
