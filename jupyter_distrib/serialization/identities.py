"""Collections of `id(...)` of the notebook's tensors and modules, such as `{id(p) for p in model.head.parameters()}`. A
copy on a rank has another id, so the objects travel in place of their ids. Kernel side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_ADDRESSES = range(1 << 32, 1 << 48)
"""The numbers that may be ids; timestamps in nanoseconds are larger."""
_MOST = 100_000
"""Length from which a collection is data."""
_MOST_INSIDE = 100
"""Length from which what a collection holds is not looked at."""
_DEPTH = 3
CONTAINERS = frozenset({list, tuple, set, frozenset, dict})
"""The types that may be or hold collections of ids."""


@dataclass(slots=True, eq=False)
class Identities:
    """The forms in which collections of ids are sent."""

    objects: Mapping[int, object] = field(default_factory=dict)
    """The tensors and modules that travel, by their ids; empty as long as they are not known."""
    may_be_needed: bool = field(default=False, init=False)
    """Whether there was a collection of what may be ids."""
    _sent: dict[int, tuple[object, object]] = field(default_factory=dict, init=False)
    """The stand-ins by the ids of the collections, each with its collection, which has to live as long."""

    def sent(self, value: Any, depth: int = _DEPTH) -> Any:
        """Return what to send for a value: itself, or a stand-in for a collection that has or holds ids of objects."""
        if type(value) not in CONTAINERS or not 0 < len(value) <= _MOST:
            return value
        if id(value) in self._sent:
            return self._sent[id(value)][1]
        made = self._of_ids(value) if _is_address(next(iter(value))) else self._with_items(value, depth)
        if made is not value:
            self._sent[id(value)] = value, made
        return made

    def changed(self, values: Mapping[str, Any]) -> dict[str, object]:
        """Return those of named values for which something else is to be sent."""
        return {
            name: made
            for name, value in values.items()
            if type(value) in CONTAINERS and value and (made := self.sent(value)) is not value
        }

    def _of_ids(self, value: Any) -> Any:
        self.may_be_needed = True
        has_ids = any(type(each) is int and each in self.objects for each in value)
        return _Collection(value, self.objects) if has_ids else value

    def _with_items(self, value: Any, depth: int) -> Any:
        if not depth or type(value) not in (list, tuple, dict) or len(value) > _MOST_INSIDE:
            return value
        items = list(value.values() if type(value) is dict else value)
        if CONTAINERS.isdisjoint(map(type, items)):
            return value
        made = [self.sent(item, depth - 1) for item in items]
        if all(new is old for new, old in zip(made, items, strict=True)):
            return value
        return dict(zip(value, made, strict=True)) if type(value) is dict else type(value)(made)


def _is_address(number: object) -> bool:
    return type(number) is int and number in _ADDRESSES


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
