"""The removal of what a cell leaves in the rank's process that the next would trip over, since the process lives on.
Main thread only.

- Signal handlers: Lightning ignores SIGINT while it shuts down, and leaves it ignored.
- What a library remembers for the life of a program (`libraries/`): Accelerate, its arguments and its process group.
"""

from __future__ import annotations

import signal
import sys
import types
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from jupyter_distrib.libraries import known

_handler = getattr(signal, "_signal", signal).getsignal
"""Without the enumeration that `signal.getsignal` makes of each answer, which takes most of its time."""
_SHARED_STATES = known.shared_states()
_HOLDER_DEPTH = 3
"""An accelerator is in a trainer, its state in the accelerator."""
_MOST_PARTS = 100
"""A longer list is data."""


class Handlers:
    """The signal handlers that every cell finds."""

    def __init__(self) -> None:
        named = signal.valid_signals() & set(signal.Signals)  # the many real-time signals would cost time at each cell
        self._first = [(int(number), _handler(number)) for number in named]

    def restore(self) -> None:
        for number, handler in self._first:
            if handler is not None and _handler(number) != handler:
                signal.signal(number, handler)


def forget_singletons() -> None:
    """Have libraries start anew in the next cell."""
    for cls in _singletons():
        cls._shared_state = {}  # a new one: what was kept of an earlier cell goes on with the old


def resume_singletons(read: Iterable[object], kept: Iterable[object]) -> None:
    """Have them go on as in the cell that kept one of the values that this one reads, if that value uses them."""
    if not (classes := _singletons()):
        return
    of_earlier = {id(value) for value in kept}
    for value in read:
        for instance in _held(value, tuple(classes), _HOLDER_DEPTH) if id(value) in of_earlier else ():
            type(instance)._shared_state = instance.__dict__  # noqa: SLF001 - they have no public way to change it


def _singletons() -> list[Any]:
    found = (getattr(sys.modules.get(module), name, None) for module, name in _SHARED_STATES)
    return [cls for cls in found if isinstance(getattr(cls, "_shared_state", None), dict)]


def _held(value: object, classes: tuple[type, ...], depth: int) -> Iterator[Any]:
    if isinstance(value, classes):
        yield value
    elif depth:
        for part in _parts(value):
            yield from _held(part, classes, depth - 1)


def _parts(value: object) -> Iterable[object]:
    match value:
        case list() | tuple():
            return value[:_MOST_PARTS]
        case dict():
            return islice(value.values(), _MOST_PARTS)
        case type() | types.ModuleType() | types.FunctionType():
            return ()
        case _:
            return list(getattr(value, "__dict__", {}).values())
