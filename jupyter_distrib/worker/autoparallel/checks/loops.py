"""The name, for sentences, of what the user's code loops over at this moment. Reads sources; rank's main thread."""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Iterator
from types import FrameType

from jupyter_distrib.system import file_owner

_AROUND = {"enumerate", "tqdm", "list", "iter", "islice"}
"""The functions in a loop's head that pass on what they are given first."""
_NUMBERS = {"range", "count", "trange"}


def looped_over(cell: str) -> str:
    """Return the innermost loop of the user's code that is being executed, such as `batches (WebLoader) on line 4`, or
    an empty string; loops over numbers do not count.

    Args:
        cell: The cell's file name.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        name = frame.f_code.co_filename
        if name == cell or file_owner.is_users(name):
            for loop in _around(name, frame.f_lineno):
                where = f"line {loop.lineno}" if name == cell else f"line {loop.lineno} of {name.rpartition('/')[2]}"
                return f"{_described(loop.iter, frame)} on {where}"
        if name == cell:
            return ""
        frame = frame.f_back
    return ""


def _around(name: str, line: int) -> Iterator[ast.For]:
    """Yield the loops around a line, from the innermost."""
    try:
        tree = ast.parse("".join(linecache.getlines(name)))
    except (SyntaxError, ValueError):
        return
    loops = [each for each in ast.walk(tree) if isinstance(each, ast.For)]
    inside = [each for each in loops if each.body[0].lineno <= line <= (each.end_lineno or 0)]
    for loop in sorted(inside, key=lambda each: each.lineno, reverse=True):
        if not (isinstance(loop.iter, ast.Call) and _called(loop.iter) in _NUMBERS):
            yield loop


def _described(thing: ast.expr, frame: FrameType) -> str:
    while isinstance(thing, ast.Call) and thing.args and _called(thing) in _AROUND:
        thing = thing.args[0]
    text = f"`{ast.unparse(thing)}`"
    if isinstance(thing, ast.Name):
        names = frame.f_globals | frame.f_locals
        return f"{text} ({type(names[thing.id]).__name__})" if thing.id in names else text
    return text


def _called(call: ast.Call) -> str:
    """Return the last name of the function that is called."""
    function = call.func
    return (
        function.id if isinstance(function, ast.Name) else function.attr if isinstance(function, ast.Attribute) else ""
    )
