"""Refuses pickles that would keep this process busy for ever, or end it, although they name nothing that is run.

A few bytes make a tuple that holds another one twice, which again holds one twice, and so on: the age of the universe
does not suffice for its hash. In C the hash of a tuple calls that of the tuple in it, so a million of them in one
another are more than the stack holds. Nobody could interrupt either, and no error is raised. So the operations are
followed here first, with the depth and the size of each value in place of the value.
"""

from __future__ import annotations

import pickle
import pickletools
from typing import Any

_MOST_LEVELS = 200
_MOST_PARTS = 10**9
"""The number of parts of all values together; what is named several times counts as often."""
_KEEPS = {"MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"}
_NAMES = {"GET", "BINGET", "LONG_BINGET"}
_ADDS = {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"}

_Extent = list[int]
"""The levels and the parts of one value, which grow with it."""


def check(content: bytes) -> None:
    """Refuse a pickle whose values are too deep or too large.

    Raises:
        pickle.UnpicklingError: They are.
        ValueError: It is no pickle.
    """
    stack: list[_Extent | None] = []  # None: a mark
    memo: dict[Any, _Extent | None] = {}
    parts = 0
    try:
        for operation, argument, _ in pickletools.genops(content):
            name = operation.name
            if name in _KEEPS:
                memo[len(memo) if name == "MEMOIZE" else argument] = stack[-1]
                continue
            if name == "MARK":
                stack.append(None)
                continue
            if name in _NAMES or name == "DUP":
                extent, more = memo[argument] if name in _NAMES else stack[-1], 0
            else:
                extent, more = _made(operation, stack)
            if operation.stack_after:
                stack.append(extent)
            levels, size = extent or (0, 0)
            parts += more or size
            if levels > _MOST_LEVELS or parts > _MOST_PARTS:
                raise pickle.UnpicklingError("it has more values within one another than can be read")
    except (IndexError, KeyError, TypeError):
        raise pickle.UnpicklingError("it is damaged") from None


def _made(operation: pickletools.OpcodeInfo, stack: list[_Extent | None]) -> tuple[_Extent, int]:
    """Take from the stack what an operation takes. Return the extent of what it makes, and by how much that has
    grown."""
    taken: list[Any] = []
    wanted = operation.stack_before
    if pickletools.markobject in wanted:
        while (top := stack.pop()) is not None:
            taken.append(top)
        wanted = wanted[: wanted.index(pickletools.markobject)]
    taken += [stack.pop() for _ in wanted]
    into = taken.pop() if operation.name in _ADDS else [0, 1]
    more = sum(size for _, size in taken)
    into[0] = max([into[0], *(levels + 1 for levels, _ in taken)])
    into[1] += more
    return into, more
