"""The averaging of losses that decide how a training goes on: each rank has seen only its share, and all have to decide
alike. Such losses are those that a closure returns to an optimizer (`LBFGS` chooses its step by them) and those that
`ReduceLROnPlateau` gets.

Collective: every rank calls them, as every rank computes gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_pre_hook

from jupyter_distrib.interfaces import identity
from jupyter_distrib.worker.autoparallel.patches import Patches
from jupyter_distrib.worker.autoparallel.training import weight_sync


class LossAveraging:
    """The averaged losses of one run.

    Args:
        applies: Returns whether the ranks train any model together.
        meets: Called before a collective begins.
    """

    def __init__(self, applies: Callable[[], bool], meets: Callable[[], None]) -> None:
        self._applies, self._meets = applies, meets
        self._undo: Callable[[], None] = lambda: None

    def install(self, patches: Patches) -> None:
        patches.replace(ReduceLROnPlateau, "step", self._on_plateau)
        self._undo = register_optimizer_step_pre_hook(self._before_step).remove

    def close(self) -> None:
        self._undo()

    def _on_plateau(self, original: Any) -> Any:
        def step(scheduler: ReduceLROnPlateau, metrics: Any, *args: Any, **keywords: Any) -> None:
            original(scheduler, self._averaged(metrics) if self._applies() else metrics, *args, **keywords)

        return step

    def _before_step(self, _: Optimizer, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        optimizer, *given = args
        closure = given[0] if given else keywords.get("closure")
        if closure is None or not self._applies():
            return None

        def together() -> Any:
            loss = closure()
            return loss if loss is None else self._averaged(loss)

        if given:
            return (optimizer, together, *given[1:]), keywords
        return args, {**keywords, "closure": together}

    def _averaged(self, value: Any) -> Any:
        self._meets()
        (total,) = weight_sync.summed((value if isinstance(value, torch.Tensor) else float(value),))
        return total / identity.world_size()
