"""Finds out whether ranks have last read the weights of a sharded model after different steps, as where each decides by
its own loss which weights are the best: each then has its part of another step. Rank's main thread; never waits for a
rank."""

from __future__ import annotations

from typing import Any

from torch import nn

from jupyter_distrib.worker.autoparallel import ownership
from jupyter_distrib.worker.autoparallel.checks import divergence
from jupyter_distrib.worker.autoparallel.patches import Patches
from jupyter_distrib.worker.pytorch.rank_store import StoreBoard


class StatesRead:
    """The calls of `state_dict()` of sharded models in one run."""

    def __init__(self) -> None:
        self._steps = 0
        self._last: int | None = None
        """The number of steps before the last call."""
        self._is_installed = False

    def step(self, patches: Patches) -> None:
        """Count a step of an optimizer with sharded parameters; from the first one on, calls are recorded."""
        self._steps += 1
        if not self._is_installed:
            self._is_installed = True
            patches.replace(nn.Module, "state_dict", self._reading)

    def difference(self, board: StoreBoard, rank: int, size: int) -> str:
        """Return how the last call differs between this rank and one that has ended its cell, as a sentence; empty if
        nothing is known to differ, or one of them has not called it."""
        for other, last in divergence.published(board, "states read", rank, size, self._last).items():
            if None not in (last, self._last) and last != self._last:
                (low, early), (high, late) = sorted([(rank, self._last), (other, last)])
                return (
                    f"state_dict() of the sharded model was last read after {early} steps on rank {low} and after "
                    f"{late} on rank {high}, so that each rank has its part of another step"
                )
        return ""

    def _reading(self, original: Any) -> Any:
        def state_dict(module: nn.Module, *args: Any, **keywords: Any) -> Any:
            is_outermost = not args and "destination" not in keywords
            if is_outermost and any(map(ownership.is_sharded, ownership.own_parameters(module))):
                self._last = self._steps
            return original(module, *args, **keywords)

        return state_dict
