"""Finds schedules of the learning rate that were made for the batches of the whole loader, of which each rank has read
a share: `OneCycleLR(..., steps_per_epoch=len(loader))` in an earlier cell. Rank's main thread.

A `LambdaLR` does not know the number of its steps, but its function usually does, under a name such as
`num_training_steps`: transformers' `get_linear_schedule_with_warmup` makes one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch.optim.lr_scheduler import LambdaLR, LRScheduler, PolynomialLR, SequentialLR

from jupyter_distrib.worker.autoparallel.patches import Patches

_TOLERANCE = 0.1
"""Tolerance for a schedule's number of steps: shares are rounded up in every epoch."""
_NAMES_ALL = re.compile(r"(?!.*(warm|epoch))(.*(total|train|max|end|decay))", re.IGNORECASE)
"""Names that a function gives to the number of all steps."""


class Schedules:
    """The schedules of one run that know the number of their steps.

    Args:
        keep: Called with each one that steps, which may have no owner at the end of the cell.
    """

    def __init__(self, keep: Callable[[LRScheduler], None]) -> None:
        self._keep = keep
        self._steps: WeakKeyDictionary[LRScheduler, int] = WeakKeyDictionary()

        self._outer: WeakKeyDictionary[LRScheduler, ref[LRScheduler]] = WeakKeyDictionary()
        """The `SequentialLR` that steps a schedule."""
        self._stepped: list[LRScheduler] = []
        """The schedules that are making a step, the outermost first."""

    @property
    def any(self) -> bool:
        """Return whether any schedule has made a step."""
        return bool(self._steps)

    def install(self, patches: Patches) -> None:
        for cls in (LRScheduler, SequentialLR):
            patches.replace(cls, "step", self._stepping)

    def cut_short(self, ranks: int, backwards: int) -> Iterator[tuple[str, int, int]]:
        """Yield the name of each schedule that has made only one rank's part of its steps, with the number made and the
        number of all.

        Args:
            ranks: The number of ranks that share the batches.
            backwards: The number of backward passes; a schedule that steps once in an epoch makes fewer steps.
        """
        for schedule, steps in self._steps.items():
            outer = self._outer[schedule]() if schedule in self._outer else None
            before = outer.last_epoch - schedule.last_epoch if outer else 0  # of those before it, such as a warm-up
            made = schedule.last_epoch + before
            if steps not in (schedule.last_epoch, schedule.last_epoch + 1) or 2 * (steps + before) <= backwards:
                continue  # a new one makes a first step that does not count
            for whole in (each + before for each in _all_steps(schedule)):
                if made < whole and abs(made * ranks - whole) <= max(ranks, _TOLERANCE * whole):
                    yield type(outer or schedule).__name__, made, whole
                    break

    def _stepping(self, original: Any) -> Any:
        def step(schedule: LRScheduler, *args: Any, **keywords: Any) -> None:
            if self._stepped:
                self._outer[schedule] = ref(self._stepped[-1])
            self._stepped.append(schedule)
            try:
                original(schedule, *args, **keywords)
            finally:
                self._stepped.pop()
            self._steps[schedule] = self._steps.get(schedule, 0) + 1
            self._keep(schedule)

        return step


def _all_steps(schedule: LRScheduler) -> Iterator[int]:
    """Yield candidates for the number of all steps of a schedule."""
    numbers = [getattr(schedule, "total_steps", None), getattr(schedule, "T_max", None)]
    if isinstance(schedule, PolynomialLR):  # a LinearLR has that of its warm-up
        numbers.append(schedule.total_iters)
    if isinstance(schedule, LambdaLR):
        for function in schedule.lr_lambdas:
            numbers += [number for name, number in _values_of(function) if _NAMES_ALL.match(name)]
    yield from (each for each in numbers if type(each) is int)


def _values_of(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names that a function uses from outside its body, with their values; for an object, its attributes."""
    if isinstance(function, partial):
        yield from function.keywords.items()
        if isinstance(function.func, FunctionType):
            yield from zip(function.func.__code__.co_varnames, function.args, strict=False)
        function = function.func
    if isinstance(function, FunctionType):
        code, cells = function.__code__, function.__closure__ or ()
        yield from ((name, function.__globals__.get(name)) for name in code.co_names)
        for name, cell in zip(code.co_freevars, cells, strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # it has no value yet
                continue
    else:
        yield from getattr(function, "__dict__", {}).items()
