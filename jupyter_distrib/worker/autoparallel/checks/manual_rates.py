"""Finds learning rates that the cell itself computes for each step from the number of steps of the whole loader, of
which each rank has read a share: `lr * 0.5 * (1 + cos(pi * step / total_steps))`. Rank's main thread."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

from jupyter_distrib.system import file_owner

_NAMES_ALL = re.compile(
    r"(?!.*(warm|epoch|per_|every|eval|val_|log))"
    r"(t_max|total|(.*_)?(total|max|maximum|num|number|nb|n|train|training|decay|all)(_(.*_)?)?"
    r"(steps?|iters?|iterations|updates))$",
    re.IGNORECASE,
)
"""Names that a cell gives to the number of all steps."""
_LOOK_AT = 4
"""The step at which the names are looked up; after the next one, numbers that have changed are left out."""
_SMALL = 1000
"""Number of entries up to which a dict is searched: settings, not data."""
_TOLERANCE = 0.1
"""Tolerance for the number of steps: shares are rounded up in every epoch, and a scaler of losses leaves out a few."""


@dataclass(slots=True)
class _Rates:
    """The learning rates of one optimizer so far."""

    last: float
    first_backward: int
    """The number of backward passes before the first step."""
    last_backward: int
    steps: int = 0
    changes: int = 0
    numbers: dict[str, int] = field(default_factory=dict)
    """Candidates for the number of all steps, by name."""


class ManualRates:
    """The learning rates of one run that no schedule of torch changes.

    Args:
        cell: The cell's file name.
    """

    def __init__(self, cell: str) -> None:
        self._cell = cell
        self._all: WeakKeyDictionary[Optimizer, _Rates] = WeakKeyDictionary()
        self._kept: _Rates | None = None
        """The rates of the optimizer that has stepped last, which may be gone by the end."""

    def stepped(self, optimizer: Optimizer, backwards: int) -> None:
        """Record the learning rate of a step, unless it is a tensor, which a device would have to send. Raises nothing.

        Args:
            optimizer: The optimizer.
            backwards: The number of backward passes so far.
        """
        with suppress(Exception):  # from the user's values: advice must not end a run
            self._record(optimizer, backwards)

    def _record(self, optimizer: Optimizer, backwards: int) -> None:
        rate = optimizer.param_groups[0].get("lr") if optimizer.param_groups else None
        if not isinstance(rate, float):
            return
        if (rates := self._all.get(optimizer)) is None:
            rates = self._all[optimizer] = _Rates(last=rate, first_backward=backwards, last_backward=backwards)
        rates.steps += 1
        rates.changes += bool(rates.last != rate)
        rates.last, rates.last_backward, self._kept = rate, backwards, rates
        if rates.steps == _LOOK_AT and 2 * rates.changes >= rates.steps:
            rates.numbers = dict(_numbers(self._cell))
        elif rates.steps == _LOOK_AT + 1 and rates.numbers:
            now = dict(_numbers(self._cell))
            rates.numbers = {name: each for name, each in rates.numbers.items() if now.get(name) == each}

    def cut_short(self, ranks: int) -> tuple[str, int, int] | None:
        """Return the number of all steps that a learning rate seems to be computed from, with its name, and the number
        of steps that were made: one rank's part of it."""
        rates = self._kept
        if rates is None or rates.steps <= _LOOK_AT or 2 * rates.changes < rates.steps:
            return None
        if rates.steps < (1 - _TOLERANCE) * (rates.last_backward - rates.first_backward):
            return None  # several batches for each step: their number is another one
        for name, whole in rates.numbers.items():
            if rates.steps < whole and abs(rates.steps * ranks - whole) <= max(ranks, _TOLERANCE * whole):
                return name, whole, rates.steps
        return None


def _numbers(cell: str) -> Iterator[tuple[str, int]]:
    """Yield the whole numbers with such names in the user's functions that are being executed, and in dicts there."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        name = frame.f_code.co_filename
        if name == cell or file_owner.is_users(name):
            for key, value in list(frame.f_locals.items()):
                yield from _named(key, value)
                if type(value) is dict and len(value) <= _SMALL:
                    for inner, number in list(value.items()):  # another thread may add some
                        yield from ((f"{key}[{inner!r}]", each) for _, each in _named(inner, number))
        if name == cell and frame.f_code.co_name == "<module>":
            return
        frame = frame.f_back


def _named(name: Any, value: Any) -> Iterator[tuple[str, int]]:
    if type(name) is str and type(value) is int and _NAMES_ALL.match(name):
        yield name, value
