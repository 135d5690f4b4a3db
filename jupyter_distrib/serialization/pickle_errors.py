"""Finds the value that cannot be pickled in a set of inputs: its name, the object, and the path to it.

Only used after pickling has failed, so it may be slow, but may not take more than a second. The first pass repeats
the pickle and discards the bytes; the object that it reached last is the cause. The second pass, in Python and under
a time limit, finds the path: its stack of open objects is exactly the way from the name to that object, including
the results of `__getstate__` and `__reduce__`, which a search through attributes would have to guess. Kernel side,
any thread.
"""

from __future__ import annotations

import pickle
import re
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jupyter_distrib.serialization.picklers import InputPickler, NullFile
from jupyter_distrib.serialization.tensors import Tensors

_PATH_TIME_S = 0.5
_DEEPEST = 150
"""Deepest path to follow. Each level costs the Python pickler about four of a thousand frames."""
_LONG = 1000
"""Number of items from which a container is searched with the C pickler, which is a hundred times as fast."""
_MAX_REASON = 300
_BINDINGS = ("__self__", "cell_contents")
_MODULE_PARTS = re.compile(r"\._(?:modules|parameters|buffers)\['(\w+)'\]")
"""The pattern of a step such as `._modules['fc']`, which is `.fc` to the user of the model."""
_ATOMS = frozenset({int, float, complex, bool, str, bytes, bytearray, type(None)})


@dataclass(frozen=True, slots=True, kw_only=True)
class PickleProblem:
    """The value that cannot be pickled in a set of inputs."""

    name: str
    """The input that cannot be pickled."""
    path: str
    """Path to the object in the input, as an expression if possible: `loader.pool._lock`, `train (global db)`."""
    type_name: str
    """The type of the object that cannot be pickled: `_thread.lock`."""
    reason: str
    """The message of the exception that pickling it raised."""


def find(inputs: Mapping[str, object], namespace: dict[str, object]) -> PickleProblem | None:
    """Return the first object that cannot be pickled; None if all can."""
    pickler = InputPickler(namespace, NullFile(), Tensors(results=False), [])
    try:
        pickler.dump_inputs(inputs)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - `__reduce__` and its kin are foreign code
        first = error if error.__cause__ is None else error.__cause__
        if isinstance(first, RecursionError) and (name := pickler.name) in inputs:
            deep = _type_name(inputs[name])
            return PickleProblem(name=name, path=name, type_name=deep, reason="it is nested too deeply")
        reason = f"{error}" or type(error).__name__
        if isinstance(error, SystemExit):
            reason = f"pickling it raises SystemExit: {error}"
        return _located(pickler.name, inputs.get(pickler.name), pickler.last, reason[:_MAX_REASON], namespace)
    return None


def _located(name: str, value: object, last: object, reason: str, namespace: dict[str, object]) -> PickleProblem:
    way = _Tracer(namespace).way_to_failure(value)
    if way is None:
        return PickleProblem(name=name, path=name, type_name=_type_name(last), reason=reason)
    return PickleProblem(name=name, path=name + _path(way), type_name=_type_name(way[-1]), reason=reason)


def _type_name(obj: object) -> str:
    cls = type(obj)
    return cls.__qualname__ if cls.__module__ in ("builtins", "__main__") else f"{cls.__module__}.{cls.__qualname__}"


class _GaveUpError(Exception):
    """The search took too long or went too deep."""


class _Tracer(pickle._Pickler):  # noqa: SLF001 - the only pickler that can be watched
    """A pickler that walks an object exactly as pickling does and records its position. Writes nothing."""

    def __init__(self, namespace: dict[str, object]) -> None:
        super().__init__(NullFile(), protocol=5, buffer_callback=lambda _: None)
        self._namespace = namespace
        self._real = InputPickler(namespace, NullFile(), Tensors(results=False), [])
        self.dispatch_table = self._real.dispatch_table
        self._open: list[Any] = []
        self._until_s = 0.0

    def way_to_failure(self, obj: object) -> list[Any] | None:
        """Return the objects from `obj` down to the one that raises; None if it was not found in time."""
        self._until_s = time.monotonic() + _PATH_TIME_S
        try:
            self.dump(obj)
        except (_GaveUpError, RecursionError):
            return None
        except (Exception, SystemExit):  # noqa: BLE001 - the failure that is looked for
            return self._open
        return None

    def reducer_override(self, obj: Any) -> Any:
        return self._real.reducer_override(obj)

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if type(obj) in _ATOMS:
            return
        if len(self._open) >= _DEEPEST or time.monotonic() > self._until_s:
            raise _GaveUpError
        self._open.append(obj)
        if type(obj) in (list, tuple, dict) and len(obj) > _LONG:
            self.save(self._failing_item(list(obj.values()) if type(obj) is dict else obj))
        else:
            super().save(obj, save_persistent_id)  # type: ignore[misc]  # not in typeshed
        self._open.pop()  # not in a `finally`: the objects still open after an error are the result

    def _failing_item(self, items: Sequence[Any]) -> Any:
        """Return the failing item by bisection, at about the cost of the failed pickling; the last one if none
        fails."""
        while len(items) > 1:
            half = len(items) // 2
            items = items[:half] if self._fails(items[:half]) else items[half:]
        return items[0]

    def _fails(self, items: Sequence[Any]) -> bool:
        try:
            InputPickler(self._namespace, NullFile(), Tensors(results=False), []).dump(items)
        except (Exception, SystemExit):  # noqa: BLE001 - the failure that is looked for
            return True
        return False


# ------------------------------------------------------------------------------------------------- naming the way


def _path(way: list[Any]) -> str:
    """Return the path as text. Only real steps are named, not the containers and reducer results in between."""
    path, index = "", 0
    while index < len(way) - 1:
        text, index = _step(way, index)
        path += text
    return _MODULE_PARTS.sub(r".\1", path)


def _step(way: list[Any], index: int) -> tuple[str, int]:
    """Return the text of one step from `way[index]`, and the index to which it leads."""
    here, below = way[index], way[index + 1]
    if type(here) in (list, tuple):
        return next((f"[{position}]" for position, item in enumerate(here) if item is below), ""), index + 1
    if isinstance(here, dict):
        return _key_step(here, below), index + 1
    if isinstance(here, types.FunctionType):
        return _function_step(here, way, index)
    return _object_step(here, way, index)


def _key_step(here: dict[Any, Any], below: object) -> str:
    for key, value in here.items():
        if value is below:
            return f"[{key!r}]" if isinstance(key, (str, int)) else f"[<{_type_name(key)}>]"
    return " (a key)"


def _function_step(function: types.FunctionType, way: list[Any], index: int) -> tuple[str, int]:
    """Return the step from a function to a value that it needs, past the containers in which cloudpickle keeps it."""
    for position in range(index + 1, min(index + 8, len(way))):
        for text, value in _needs(function):
            if value is way[position]:
                return f" ({text})", position
    return "", index + 1


def _needs(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield f"global {name}", function.__globals__[name]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield f"closure variable {name}", _attributes(cell).get("cell_contents")
    for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield "a default argument", value


def _object_step(here: object, way: list[Any], index: int) -> tuple[str, int]:
    """Return the step from an instance to an attribute, past the state and arguments that its reducer returned."""
    attributes = _attributes(here)
    for position in range(index + 1, min(index + 5, len(way))):
        name = next((name for name, value in attributes.items() if value is way[position]), None)
        if name is not None:
            return f".{name}", position
        state = way[position]
        if type(state) is dict and position + 1 < len(way):
            key = next((key for key, value in state.items() if value is way[position + 1]), None)
            if isinstance(key, str):
                return f".{key}", position + 1
        if type(state) not in (tuple, dict):
            return "", position
    return "", min(index + 2, len(way) - 1)


def _attributes(obj: object) -> dict[str, object]:
    """Return the attributes that can be read without running user code, by name; for a method, its bound object."""
    found: dict[str, object] = dict(getattr(obj, "__dict__", None) or {})
    for cls in type(obj).__mro__:
        for name, slot in vars(cls).items():
            is_bound = name in _BINDINGS and isinstance(slot, types.GetSetDescriptorType)
            if is_bound or isinstance(slot, types.MemberDescriptorType):
                try:
                    found.setdefault(name, getattr(obj, name))
                except (AttributeError, ValueError):  # an empty slot, an empty cell
                    continue
    return found
