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

_READINGS = 1000
"""Number of steps after which a rank has read weights that are recorded; of ranks that read more, nothing is said."""


class StatesRead:
    """The calls of `state_dict()` of sharded models in one run."""

    def __init__(self) -> None:
        self._steps = 0
        self._read: list[int] = []
        """The numbers of steps before the first calls, each once."""
        self._is_installed = False

    def step(self, patches: Patches) -> None:
        """Count a step of an optimizer with sharded parameters; from the first one on, calls are recorded."""
        self._steps += 1
        if not self._is_installed:
            self._is_installed = True
            patches.replace(nn.Module, "state_dict", self._reading)

    def difference(self, board: StoreBoard, rank: int, size: int) -> str:
        """Return how the last call differs between this rank and one that has ended its cell, as a sentence; empty if
        nothing is known to differ, or only one of them has called it at times when the other has not: rank 0 alone may
        write the weights in the end."""
        for other, read in divergence.published(board, "states read", rank, size, self._read).items():
            is_apart = set(self._read) - set(read) and set(read) - set(self._read) and self._read[-1] != read[-1]
            if is_apart and max(len(self._read), len(read)) < _READINGS:
                (low, early), (high, late) = sorted([(rank, self._read[-1]), (other, read[-1])])
                return (
                    f"state_dict() of the sharded model was last read after {early} steps on rank {low} and after "
                    f"{late} on rank {high}, so that each rank has its part of another step"
                )
        return ""

    def _reading(self, original: Any) -> Any:
        def state_dict(module: nn.Module, *args: Any, **keywords: Any) -> Any:
            is_outermost = not args and "destination" not in keywords
            is_new = self._steps not in self._read[-1:] and len(self._read) < _READINGS
            if is_outermost and is_new and any(map(ownership.is_sharded, ownership.own_parameters(module))):
                self._read.append(self._steps)
            return original(module, *args, **keywords)

        return state_dict
