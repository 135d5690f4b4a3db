"""Keeps the objects that a cell has trained last, for the checks at its end: a function that the cell calls may be
their only owner.
Rank's main thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn.modules.module import register_module_parameter_registration_hook


class LastTrained:
    """The models, optimizers, schedules and tensors that were trained last in one run. They are let go when another
    model or optimizer is built, which may need their memory, and after the checks."""

    def __init__(self) -> None:
        self._things: dict[int, object] = {}

    def begin(self) -> Callable[[], None]:
        """Watch for new models; return the function that ends this."""

        def registering(*_: Any) -> None:
            self._things.clear()

        return register_module_parameter_registration_hook(registering).remove

    def keep(self, *things: object) -> None:
        """Keep these objects, too."""
        self._things |= {id(each): each for each in things}

    def has(self, thing: object) -> bool:
        return id(thing) in self._things

    def let_go(self) -> None:
        self._things.clear()
