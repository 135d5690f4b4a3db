"""Walks the code objects of a function and of all functions, classes and comprehensions inside it; finds the function
that a decorated one wraps. Any process."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dis import get_instructions
from types import CodeType, FunctionType
from typing import Any


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object, and then those nested in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def names_in(code: CodeType) -> set[str]:
    """Return the globals that a code object and its nested ones look up or bind, and the attributes that they use."""
    return {name for each in codes_in(code) for name in each.co_names}


def undecorated(value: Any) -> Any:
    """Return the function that a method or a decorated function wraps; any other value, and one that wraps itself, as
    it is."""
    try:
        return inspect.unwrap(getattr(value, "__func__", value))
    except Exception:  # noqa: BLE001 - objects of the user may answer in any way
        return value


def own_functions(names: Mapping[str, object]) -> list[FunctionType]:
    """Return the functions of the notebook, and those of its classes, among the values of these names."""
    code = [each for each in names.values() if issubclass(type(each), (FunctionType, type))]
    own = [each for each in code if each.__module__ == "__main__"]
    parts = [part for each in own for part in (vars(each).values() if isinstance(each, type) else (each,))]
    return [each for each in parts if isinstance(each, FunctionType)]


def bound_globals(code: CodeType) -> set[str]:
    """Return the globals that a code object and its nested ones bind."""
    return {each.argval for part in codes_in(code) for each in get_instructions(part) if each.opname == "STORE_GLOBAL"}


def read_globals(code: CodeType) -> set[str]:
    """Return the globals and builtins that a code object and its nested ones look up, without attributes."""
    reading = ("LOAD_GLOBAL", "LOAD_NAME")
    return {each.argval for part in codes_in(code) for each in get_instructions(part) if each.opname in reading}
