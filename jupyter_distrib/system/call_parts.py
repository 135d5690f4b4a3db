"""The names under which the parts of a function's call travel to the ranks, and the words for them in messages: no
notebook contains these names. Standard library only."""

from __future__ import annotations

FUNCTION, ARGUMENTS, KEYWORDS = "__function__", "__arguments__", "__keywords__"
_WORDS = {FUNCTION: "the function", ARGUMENTS: "the arguments", KEYWORDS: "the keyword arguments"}
PLURAL = frozenset({ARGUMENTS, KEYWORDS})


def named(name: str) -> str:
    """Return the words for a part of a call, and any other name in backticks."""
    return _WORDS.get(name, f"`{name}`")
