"""Collections of `id(...)` of the notebook's tensors and modules, such as `{id(p) for p in model.head.parameters()}`. A
copy on a rank has another id, so the objects travel in place of their ids. Kernel side."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping
from typing import Any

_LEAST = 1 << 32
"""A number below is no address of an object."""


class Identities:
    """The tensors and modules among the inputs of a cell, by their ids."""

    def __init__(self, inputs: Mapping[str, object]) -> None:
        self._inputs = inputs
        self._sent: dict[int, object] = {}

    def sent_inputs(self) -> dict[str, object]:
        """Return what to send for each input."""
        return {name: self.sent(value) for name, value in self._inputs.items()}

    def sent(self, value: Any) -> object:
        """Return what to send for a value: itself, or a stand-in for a collection with ids of these objects."""
        if type(value) not in (list, tuple, set, frozenset, dict) or not value:
            return value
        first = next(iter(value))
        if type(first) is not int or first < _LEAST or not any(map(self._is_id, value)):
            return value
        return self._sent.setdefault(id(value), _Collection(value, self._objects))

    def _is_id(self, number: object) -> bool:
        return type(number) is int and number in self._objects

    @functools.cached_property
    def _objects(self) -> dict[int, object]:
        torch: Any = sys.modules.get("torch")
        if not hasattr(torch, "nn"):
            return {}
        found = dict[int, object]()
        for value in self._inputs.values():
            for each in (value, *_items(value)):
                if isinstance(each, torch.nn.Module):
                    parts = (*each.modules(), *each.parameters(), *each.buffers())
                    found |= {id(part): part for part in parts}
                elif isinstance(each, torch.Tensor):
                    found[id(each)] = each
        return found


def _items(value: Any) -> Iterator[object]:
    if type(value) in (list, tuple, set):
        yield from value
    elif type(value) is dict:
        yield from value.values()


class _Collection:
    def __init__(self, value: Any, objects: Mapping[int, object]) -> None:
        self._value, self._objects = value, objects

    def __reduce__(self) -> tuple[Any, ...]:
        known = self._objects
        keys = [(True, known[each]) if type(each) is int and each in known else (False, each) for each in self._value]
        values = list(self._value.values()) if isinstance(self._value, dict) else None
        return collection, (type(self._value), keys, values)


def collection(cls: Any, keys: list[tuple[bool, Any]], values: list[Any] | None) -> Any:
    """Return a collection with the ids of these objects, and with the other keys as they are."""
    numbers = [id(key) if is_object else key for is_object, key in keys]
    return cls(numbers) if values is None else dict(zip(numbers, values, strict=True))
