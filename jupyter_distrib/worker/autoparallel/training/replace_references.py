"""Replaces objects with other objects wherever they are referenced. Runs in a rank's main thread.

`fully_shard` gives a model new parameters, and a holder of the old ones (an optimizer, a list that is clipped after
each backward pass, a variable of a loop that is over) would go on with tensors that no gradient ever reaches, without
an error. So lists, dicts, sets, tuples, attributes, closures and local variables get the new ones. Objects that the
forkserver has imported are frozen (`gc.freeze`) and not searched.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import types
from collections.abc import Mapping
from typing import Any

_HERE = (lambda: 0).__code__.co_filename


def replace(new_of: Mapping[int, tuple[Any, Any]], *, local_variables: bool = True) -> None:
    """Replace all references to `old` with `new`.

    Args:
        new_of: `(old, new)` by the `id` of the old one.
        local_variables: Whether to replace local variables of functions that are being executed, too.
    """
    if local_variables:
        _replace_locals(new_of)
    olds = tuple(old for old, _ in new_of.values())  # a tuple is passed as it is: else Python 3.13 finds a copy
    ours = {id(olds), id(new_of), *map(id, new_of.values()), id(vars())}
    tuples: dict[int, tuple[Any, Any]] = {}
    for holder in gc.get_referrers(*olds):
        if id(holder) in ours or isinstance(holder, types.FrameType):
            continue
        if isinstance(holder, tuple):
            if any(id(item) in new_of for item in holder):
                tuples[id(holder)] = holder, _like(holder, [_new(item, new_of) for item in holder])
        else:
            _replace_in(holder, new_of)
    del holder
    if tuples:
        replace(tuples, local_variables=local_variables)  # tuples cannot be changed, so their holders get new ones


def _new(item: Any, new_of: Mapping[int, tuple[Any, Any]]) -> Any:
    return new_of[id(item)][1] if id(item) in new_of else item


def _like(holder: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    cls: Any = type(holder)
    return cls._make(items) if hasattr(cls, "_make") else tuple(items)


def _replace_in(holder: Any, new_of: Mapping[int, tuple[Any, Any]]) -> None:
    if isinstance(holder, dict):
        if any(id(key) in new_of for key in holder):
            items = [(_new(key, new_of), _new(value, new_of)) for key, value in holder.items()]
            holder.clear()  # in the same order
            holder.update(items)
        else:
            for key, value in list(holder.items()):
                if id(value) in new_of:
                    holder[key] = _new(value, new_of)
    elif isinstance(holder, list):
        for index, item in enumerate(holder):
            if id(item) in new_of:
                holder[index] = _new(item, new_of)
    elif isinstance(holder, set):
        for item in [item for item in holder if id(item) in new_of]:
            holder.discard(item)
            holder.add(_new(item, new_of))
    elif isinstance(holder, types.CellType):
        holder.cell_contents = _new(holder.cell_contents, new_of)
    else:
        for name, value in list(getattr(holder, "__dict__", {}).items()):
            if id(value) in new_of:
                holder.__dict__[name] = _new(value, new_of)


def _replace_locals(new_of: Mapping[int, tuple[Any, Any]]) -> None:
    """Replace local variables of the functions that are being executed, which the garbage collector does not see."""
    frame: types.FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        if frame.f_code.co_filename != _HERE and frame.f_code.co_flags & 0x1:  # CO_OPTIMIZED: not a module's or cell's
            names = frame.f_locals
            stale = [name for name, value in names.items() if id(value) in new_of]
            for name in stale:
                names[name] = _new(names[name], new_of)
            if stale and sys.version_info < (3, 13):  # from then on `f_locals` writes through (PEP 667)
                ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
        frame = frame.f_back
