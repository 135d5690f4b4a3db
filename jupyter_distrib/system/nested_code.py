"""Walks the code objects of a function and of all functions, classes and comprehensions inside it. Any process."""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object, and then those nested in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def names_in(code: CodeType) -> set[str]:
    """Return the globals that a code object and its nested ones look up or bind, and the attributes that they use."""
    return {name for each in codes_in(code) for name in each.co_names}
