"""Finds schedules of the learning rate that were made for the batches of the whole loader, of which each rank has read
a share: `OneCycleLR(..., steps_per_epoch=len(loader))` in an earlier cell. Rank's main thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim.lr_scheduler import LRScheduler

from jupyter_distrib.worker.autoparallel.patches import Patches

_TOLERANCE = 0.1
"""The part of its steps by which a schedule may differ: shares are rounded up in every epoch."""


class Schedules:
    """The schedules of one run that know the number of their steps.

    Args:
        keep: Called with each one that steps, which may have no owner at the end of the cell.
    """

    def __init__(self, keep: Callable[[LRScheduler], None]) -> None:
        self._keep = keep
        self._steps: WeakKeyDictionary[LRScheduler, int] = WeakKeyDictionary()

    def install(self, patches: Patches) -> None:
        patches.replace(LRScheduler, "step", self._stepping)

    def cut_short(self, ranks: int, backwards: int) -> Iterator[tuple[str, int, int]]:
        """Yield the name of each schedule that has made only one rank's part of its steps, and both numbers.

        Args:
            ranks: The number of ranks that share the batches.
            backwards: The number of backward passes; a schedule that steps once in an epoch makes fewer steps.
        """
        for schedule, steps in self._steps.items():
            whole = getattr(schedule, "total_steps", None) or getattr(schedule, "T_max", None)
            made = schedule.last_epoch
            if not isinstance(whole, int) or made >= whole or steps not in (made, made + 1) or 2 * steps <= backwards:
                continue  # a new one makes a first step that does not count
            if abs(made * ranks - whole) <= max(ranks, _TOLERANCE * whole):
                yield type(schedule).__name__, made, whole

    def _stepping(self, original: Any) -> Any:
        def step(schedule: LRScheduler, *args: Any, **keywords: Any) -> None:
            original(schedule, *args, **keywords)
            self._steps[schedule] = self._steps.get(schedule, 0) + 1
            self._keep(schedule)

        return step
