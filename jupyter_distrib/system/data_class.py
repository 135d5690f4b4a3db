"""The decorator for data classes that are loaded at startup. Any process; standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
def data_class(cls: type[T]) -> type[T]:
    """Make a keyword-only dataclass with slots, which type checkers treat as frozen.

    All of them share their comparison and `repr`. A class for which `dataclass` generates these, and the code that
    freezes it at run time, takes four times as long to create, and `%load_ext` waits for a hundred of them.
    """
    made: Any = dataclass(slots=True, kw_only=True, eq=False, repr=False, match_args=False)(cls)
    for name, shared in _SHARED.items():
        if name not in vars(cls):
            setattr(made, name, shared)
    return made  # type: ignore[no-any-return]


def _is_equal(one: Any, other: object) -> bool:
    return _compared(one) == _compared(other) if type(one) is type(other) else NotImplemented


def _hash(one: Any) -> int:
    return hash(_compared(one))


def _compared(one: Any) -> tuple[object, ...]:
    return tuple([getattr(one, each.name) for each in fields(one) if each.compare])


def _shown(one: Any) -> str:
    shown = ", ".join(f"{each.name}={getattr(one, each.name)!r}" for each in fields(one) if each.repr)
    return f"{type(one).__name__}({shown})"


_SHARED = {"__eq__": _is_equal, "__hash__": _hash, "__repr__": _shown}
