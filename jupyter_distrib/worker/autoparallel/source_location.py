"""Names, for messages, the line and the loop of the user's code that are being executed. Rank's main thread."""

from __future__ import annotations

import ast
import hashlib
import linecache
import os
import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import TypeAlias

import torch

from jupyter_distrib.system import file_owner, running_program


def current_line(cell: str) -> str:
    """Return `line 12` for the cell with this file name, or `Cell In[3], line 4`; empty if no line of the user is
    active.

    A line of the cell, or of the function that is called in place of a cell, takes precedence over lines of functions
    that it calls in other cells or modules of the user; a line of a program that the cell runs, by `%run` or runpy,
    over both: `train.py, line 12`.
    """
    if program := running_program.line(sys._getframe(1), cell):  # noqa: SLF001
        return program
    innermost = outermost = ""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        name = frame.f_code.co_filename
        if name == cell:
            return outermost if file_owner.is_own(name) else f"line {frame.f_lineno}"
        if file_owner.is_users(name):
            outermost = f"{file_of(name)}, line {frame.f_lineno}"
            innermost = innermost or outermost
        frame = frame.f_back
    return innermost


Calls: TypeAlias = tuple[tuple[CodeType, int], ...]


def current_calls() -> Calls:
    """Return the places in the user's code that are being executed, innermost first: two calls on one line differ."""
    calls = []
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        if file_owner.is_users(frame.f_code.co_filename):
            calls.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(calls)


def place_of_calls() -> str:
    """Return a name for these places that is the same on all ranks."""
    calls = (f"{os.path.basename(code.co_filename)} {code.co_qualname} {at}" for code, at in current_calls())
    return hashlib.blake2b("\n".join(calls).encode(), digest_size=12).hexdigest()


_WRAPPERS = {"enumerate", "tqdm", "list", "iter", "islice"}
"""Wrappers that iterate over their first argument."""
_NUMBERS = {"range", "count", "trange"}


def file_of(name: str) -> str:
    """Return the name of a file for a message, without its folder. That of another cell stays whole, for which the
    kernel shows `Cell In[3]`."""
    folder, base = os.path.split(name)
    return name if os.path.basename(folder).startswith("ipykernel_") else base


def current_loop(cell: str) -> str:
    """Return the innermost running loop of the user's code, such as `batches (WebLoader) on line 4`; empty if there is
    none. Loops over numbers, modules or optimizers do not count.

    Args:
        cell: The cell's file name.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        name = frame.f_code.co_filename
        if name == cell or file_owner.is_users(name):
            for loop in _loops_around(name, frame.f_lineno):
                if _goes_over_modules(loop, frame):
                    continue
                where = f"line {loop.lineno}" if name == cell else f"{file_of(name)}, line {loop.lineno}"
                return f"{_described(loop.iter, frame)} on {where}"
        if name == cell:
            return ""
        frame = frame.f_back
    return ""


def _loops_around(name: str, line: int) -> Iterator[ast.For]:
    """Yield the loops around a line, from the innermost."""
    try:
        tree = ast.parse("".join(linecache.getlines(name)))
    except (SyntaxError, ValueError):
        return
    loops = [each for each in ast.walk(tree) if isinstance(each, ast.For)]
    inside = [each for each in loops if each.body[0].lineno <= line <= (each.end_lineno or 0)]
    for loop in sorted(inside, key=lambda each: each.lineno, reverse=True):
        over = _unwrapped(loop.iter)
        if not (isinstance(over, ast.Call) and called(over) in _NUMBERS):
            yield loop


def _unwrapped(thing: ast.expr) -> ast.expr:
    while isinstance(thing, ast.Call) and thing.args and called(thing) in _WRAPPERS:
        thing = thing.args[0]
    return thing


def _goes_over_modules(loop: ast.For, frame: FrameType) -> bool:
    """Return whether the variables of a loop hold a part of a model now, or an optimizer."""
    names = [each.id for each in ast.walk(loop.target) if isinstance(each, ast.Name)]
    values = [(frame.f_globals | frame.f_locals).get(each) for each in names]
    return any(issubclass(type(each), (torch.nn.Module, torch.optim.Optimizer)) for each in values)


def _described(thing: ast.expr, frame: FrameType) -> str:
    thing = _unwrapped(thing)
    text = f"`{ast.unparse(thing)}`"
    if isinstance(thing, ast.Name):
        names = frame.f_globals | frame.f_locals
        return f"{text} ({type(names[thing.id]).__name__})" if thing.id in names else text
    return text


def called(call: ast.Call) -> str:
    """Return the name of the called function without its module or object."""
    function = call.func
    return (
        function.id if isinstance(function, ast.Name) else function.attr if isinstance(function, ast.Attribute) else ""
    )
