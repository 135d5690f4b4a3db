"""The functions that a model calls itself, so that `torch.compile` traces them: `private.leave_out_of_compiler` allows
it here. They read nothing that varies from one call to the next: it would be compiled again for each new value. Rank's
main thread.
"""

from __future__ import annotations

from typing import Any

import torch


class Modes:
    """Notices that the mode of a module is set."""

    def __init__(self) -> None:
        self._mark: object | None = None
        """An object that was made since a mode was last set; None if there is none yet."""

    def mark(self) -> object:
        """Return an object that stays the same until the mode of a module is set."""
        if self._mark is None:
            self._mark = object()
        return self._mark

    def set(self) -> None:
        """Record that a mode is set."""
        self._mark = None


modes = Modes()
"""The modes of all modules in this process."""


def setting_mode(original: Any) -> Any:
    """Return `Module.train` that records its calls."""

    def train(module: Any, mode: bool = True) -> Any:
        modes.set()
        return original(module, mode)

    return train


def reshard_after_evaluation(root: Any, *_: object) -> None:
    """Reshard a model after a forward pass without gradients or in eval mode, since FSDP (2.13) keeps its own
    parameters gathered until a backward pass, and what is done to these is lost. That gathers them again."""
    if not (torch.is_grad_enabled() and root.training):
        root.reshard()
