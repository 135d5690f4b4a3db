"""The removal of traces of a cell from the rank's process that would make the next cell fail, since the process lives
on. Main thread only.

- Signal handlers: Lightning ignores SIGINT while it shuts down, and leaves it ignored.
- States that a library keeps for the life of a program (`libraries/`): Accelerate's arguments and process group,
  MLflow's active runs.
"""

from __future__ import annotations

import signal
import sys
import traceback
import types
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from jupyter_distrib.libraries import known

_handler = getattr(signal, "_signal", signal).getsignal
"""The function behind `signal.getsignal`, without the conversion to an enumeration, which takes most of the time."""
_SHARED_STATES = known.shared_states()
_AFTER_CELL = known.after_cell()
_HOLDER_DEPTH = 3
"""The depth of the search for a state: an accelerator is in a trainer, its state in the accelerator."""
_MOST_PARTS = 100
"""The number of items that are searched in a list or dict: a longer one is data."""


class Handlers:
    """The signal handlers that every cell finds at its beginning."""

    def __init__(self) -> None:
        named = signal.valid_signals() & set(signal.Signals)  # the many real-time signals would cost time at each cell
        self._first = [(int(number), _handler(number)) for number in named]

    def restore(self) -> None:
        for number, handler in self._first:
            if handler is not None and _handler(number) != handler:
                signal.signal(number, handler)


def forget_singletons() -> None:
    """Reset the shared states of libraries for the next cell."""
    for cls in _singletons():
        cls._shared_state = {}  # a new dict: kept values of an earlier cell go on with the old one


def resume_singletons(read: Iterable[object], kept: Iterable[object]) -> None:
    """Restore the shared states of the cell that kept a value which this cell reads, if that value uses them."""
    if not (classes := _singletons()):
        return
    of_earlier = {id(value) for value in kept}
    for value in read:
        for instance in _held(value, tuple(classes), _HOLDER_DEPTH) if id(value) in of_earlier else ():
            type(instance)._shared_state = instance.__dict__  # noqa: SLF001 - they have no public way to change it


def close_libraries() -> None:
    """Let the libraries that the cell has loaded close what it left open."""
    for name, close in _AFTER_CELL:
        if (module := sys.modules.get(name)) is not None:
            try:
                close(module)
            except Exception:  # noqa: BLE001 - foreign code; the cell has ended already
                traceback.print_exc()


def _singletons() -> list[Any]:
    classes = (getattr(sys.modules.get(module), name, None) for module, name in _SHARED_STATES)
    return [cls for cls in classes if isinstance(getattr(cls, "_shared_state", None), dict)]


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
