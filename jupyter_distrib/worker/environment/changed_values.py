"""Finds lists, dictionaries, sets, arrays and objects of the notebook that a cell has changed on the ranks and left
there: the notebook's own stay as they were before, and a plot of them is empty. Rank's main thread."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from jupyter_distrib.system import call_parts, file_owner
from jupyter_distrib.system.nested_code import bound_globals, names_in, own_functions

_CONTAINERS = list, dict, set, deque, defaultdict, OrderedDict, Counter
_MOST_ITEMS = 10_000
"""Number of items up to which a container is compared with what it was."""
_MOST_BYTES = 1_000_000
"""Size up to which arrays are compared."""
_MOST_PARTS = 200
"""Number of items up to which what is in them is compared, too."""
_DEPTH = 8
"""Depth to which containers and objects in a value are compared."""
_said: dict[str, int] = {}
"""Digest of the text of the cell that has the note on a value, by the value's name. The same cell gets it again when it
is run again, since its output is then a new one."""


class ChangedValues:
    """The values of the notebook that one cell has on this rank, as they are before the cell.

    Args:
        names: The namespace of the cell, or of a function's call.
        kept_values: Values that earlier cells have left on this rank, which cells change for good.
    """

    def __init__(self, names: dict[str, object], kept_values: Iterable[object]) -> None:
        self._kept = kept = {id(each) for each in kept_values}
        self._names = names
        self._given = call_parts.arguments(names)
        self._ids = {name: id(value) for name, value in names.items() if not name.startswith("_")}
        self._before = [  # by their ids, so that what the cell deletes is freed
            (name, id(value), content)
            for name, value in (*names.items(), *self._given.items())
            if not name.startswith("_") and id(value) not in kept
            if (content := _content(value, _Left(seen={*kept}))) is not None
        ]

    def note(self, text: str, keep: Collection[str], returned: object) -> str:
        """Return a sentence on the values that the cell has changed in place and that stay on the ranks; "" if there
        are none, or if another cell has a note on them.

        Args:
            text: The text of the cell.
            keep: The names that the cell keeps.
            returned: The value of the cell.
        """
        changed = [
            name
            for name, identity, content in self._before
            if id(value := self._value(name, identity)) == identity
            and _content(value, _Left(seen={*self._kept})) != content
        ]
        left = [
            name
            for name in dict.fromkeys((*changed, *self._bound_by_functions()))
            if name not in keep
            and not any(_holds(returned, each[name]) for each in (self._names, self._given) if name in each)
            and _said.setdefault(name, hash(text)) == hash(text)
        ]
        if not left:
            return ""
        listed, (are, ones) = ", ".join(f"`{name}`" for name in left), ("are", "them") if left[1:] else ("is", "it")
        what, cure = (
            "cell",
            f"add --keep {','.join(left)}, and read {left[0]}[0] in the notebook, or end the cell with {ones}",
        )
        if call_parts.FUNCTION in self._names:
            what, cure = "function", f"return {ones} from the function"
        return (
            f"{listed} of the notebook {are} as before: the {what} has changed copies on the ranks. "
            f"To have the changes, {cure}"
        )

    def _value(self, name: str, identity: int) -> object:
        """Return the value of a name, or of an argument if that is the one with this id."""
        given = self._given.get(name)
        return given if id(given) == identity else self._names.get(name)

    def _bound_by_functions(self) -> list[str]:
        """Return the names to which functions of the notebook have bound something else (`global steps`)."""
        anew = {name for name, identity in self._ids.items() if id(self._names.get(name)) != identity}
        codes = [each.__code__ for each in own_functions(self._names)] if anew else []
        bound = {name for code in codes if not anew.isdisjoint(names_in(code)) for name in bound_globals(code)}
        return [name for name in self._ids if name in anew & bound and name in self._names]


@dataclass(slots=True)
class _Left:
    """The numbers of items and bytes that may still be compared of one value."""

    items: int = _MOST_ITEMS
    size_bytes: int = _MOST_BYTES
    seen: set[int] = field(default_factory=set)
    """Ids of the containers and objects that are being compared, which may refer to one another, and of kept values."""


def _content(value: Any, left: _Left, depth: int = _DEPTH) -> object:
    """Return what is compared of a value: the ids of the items of a container or of the attributes of an object of the
    user's classes, with what is compared of each (`{"loss": [], "accuracy": []}`), or the numbers of a small array or
    tensor on the CPU. None for anything else."""
    if id(value) in left.seen:
        return None
    if (items := _items(value)) is None:
        return _numbers(value, left)
    if len(items) > left.items:
        return None
    left.seen.add(id(value))
    left.items -= len(items)
    ids = [id(each) for each in items]
    if depth and len(items) <= _MOST_PARTS and any(map(_is_compared, set(map(type, items)))):
        return ids, [_content(each, left, depth - 1) for each in items]
    return ids


def _items(value: Any) -> list[object] | None:
    kind = type(value)
    if kind in _CONTAINERS:
        return [*value, *value.values()] if isinstance(value, dict) else list(value)
    if not _is_own(kind):
        return None
    try:
        attributes = object.__getattribute__(value, "__dict__")  # runs no code of the class
    except AttributeError:
        return []
    return [each for name, each in attributes.items() if not name.startswith("_")]


def _is_compared(kind: type) -> bool:
    return kind in _CONTAINERS or kind in _arrays() or _is_own(kind)


def _is_own(kind: type) -> bool:
    """Return whether a class is the user's, and its objects show results: not a model, of which there is another note,
    nor a data set, which opens its files when it is read."""
    if kind.__module__ == "builtins":
        return False
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    if kind.__module__ != "__main__" and (file is None or file_owner.is_library(file)):
        return False
    torch = sys.modules.get("torch")
    return not issubclass(kind, (type, BaseException, *((torch.nn.Module, torch.utils.data.Dataset) if torch else ())))


def _arrays() -> tuple[type, ...]:
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    return (*((numpy.ndarray,) if numpy else ()), *((torch.Tensor, torch.nn.Parameter) if torch else ()))


def _numbers(value: Any, left: _Left) -> bytes | None:
    if type(value) not in _arrays():
        return None
    with suppress(TypeError, RuntimeError):  # a sparse tensor, which has no `nbytes`; bfloat16, one on a GPU, objects
        if value.nbytes <= left.size_bytes:
            left.size_bytes -= value.nbytes
            array = value.detach().numpy() if hasattr(value, "detach") else value
            return None if array.dtype.hasobject else bytes(array.tobytes())
    return None


def _holds(returned: object, value: object) -> bool:
    """Return whether the value of a cell is this value, or has it in it."""
    if isinstance(returned, (list, tuple)):
        return returned is value or any(each is value for each in returned[:_MOST_ITEMS])
    if isinstance(returned, dict):
        return returned is value or any(each is value for each in returned.values())
    return returned is value
