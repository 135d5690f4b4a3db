"""The names that ranks provide; and those under which the parts of a function's call travel to them, which no notebook
contains, with the words for these in messages. Standard library only."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

NAMES_OF_RANKS = ("rank", "local_rank", "world_size", "device", "get_ipython", "display", "jupyter_distrib")
"""The names that every cell or function has on its ranks, unless the notebook has bound them."""
FUNCTION, ARGUMENTS, KEYWORDS = "__function__", "__arguments__", "__keywords__"
_WORDS = {FUNCTION: "the function", ARGUMENTS: "the arguments", KEYWORDS: "the keyword arguments"}
PLURAL = frozenset({ARGUMENTS, KEYWORDS})


def named(name: str) -> str:
    """Return the words for a part of a call, and any other name in backticks."""
    return _WORDS.get(name, f"`{name}`")


def arguments(names: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the call by parameter, with `self` for the object of a method; none for a cell.

    Args:
        names: The names on the rank, with the parts of the call.
    """
    function = names.get(FUNCTION)
    try:
        bound = inspect.signature(function).bind(*names[ARGUMENTS], **names[KEYWORDS]) if function else None
        called: Any = inspect.unwrap(function) if function else None
    except Exception:  # noqa: BLE001 - foreign code may describe its parameters in any way, or has none
        return {}
    if bound is None:
        return {}
    given = dict(bound.arguments)
    for parameter in bound.signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            given |= given.pop(parameter.name, {})
    return {"self": called.__self__, **given} if inspect.ismethod(called) else given
