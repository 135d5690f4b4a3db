"""Finds means that the user's code computes over the whole data set although each rank has read only a share.

Looked for is a division, behind the loop that reads a divided loader, by the number of all samples:
`total / len(loader.dataset)`. It is found in the text of the functions that are being executed, whose names are looked
up in their frames without calling anything. Rank's main thread.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, TypeGuard

from torch.utils.data import DataLoader

from jupyter_distrib.system import file_owner
from jupyter_distrib.worker.autoparallel import source_location

_ADDS_UP = {"all_reduce", "reduce", "all_gather", "all_gather_object", "gather_object", "total"}
"""Names of functions by which a cell may add up the numbers of all ranks before it divides."""


def over_all_samples(loader: DataLoader[Any], cell: str) -> tuple[str, str] | None:
    """Return the divisor of such a mean and its line, such as `len(loader.dataset)` and `line 12`.

    Args:
        loader: The loader that is about to be read.
        cell: The cell's file name.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    is_innermost = True
    while frame is not None:
        name = frame.f_code.co_filename
        if name == cell or file_owner.is_users(name):
            for divisor in _divisors_behind(loader, frame, after_loop=is_innermost):
                if _is_number_of_samples(divisor, loader, frame):
                    where = f"line {divisor.lineno}"
                    return ast.unparse(divisor), where if name == cell else f"{source_location.file_of(name)}, {where}"
            is_innermost = False
        if name == cell and frame.f_code.co_name == "<module>":
            return None
        frame = frame.f_back
    return None


def _divisors_behind(loader: DataLoader[Any], frame: FrameType, *, after_loop: bool) -> Iterator[ast.expr]:
    """Yield the divisors used after the loop around this frame, or from the line of the call on if the function that it
    calls contains the loop; skip divisions of a number from another pass over the loader."""
    try:
        tree = ast.parse("".join(linecache.getlines(frame.f_code.co_filename)))
    except (SyntaxError, ValueError):
        return
    line, body = frame.f_lineno, _function_around(tree, frame)
    if any(isinstance(each, ast.Call) and source_location.called(each) in _ADDS_UP for each in ast.walk(body)):
        return
    if after_loop:
        loops = [each for each in ast.walk(body) if isinstance(each, ast.For) and each.lineno == line]
        if not loops:
            return
        line = (loops[-1].end_lineno or line) + 1
    again = [each for each in ast.walk(body) if _reads(each, loader, frame) and each.lineno >= line + (not after_loop)]
    for each in ast.walk(body):
        match each:
            case ast.BinOp(op=ast.Div(), left=mean, right=divisor) if divisor.lineno >= line:
                pass
            case ast.AugAssign(op=ast.Div(), target=mean, value=divisor) if each.lineno >= line:
                pass
            case _:
                continue
        if not any(_leads_to(read, mean) for read in again if read.lineno <= divisor.lineno):
            yield divisor


def _reads(node: ast.AST, loader: DataLoader[Any], frame: FrameType) -> TypeGuard[ast.stmt | ast.expr]:
    """Return whether a loop or a comprehension reads the loader, or an assignment or an expression gives it to a
    function."""
    match node:
        case ast.For(iter=source):
            sources: list[ast.expr] = [source]
        case ast.GeneratorExp(generators=parts) | ast.ListComp(generators=parts) | ast.SetComp(generators=parts):
            sources = [each.iter for each in parts]
        case ast.Assign(value=ast.Call() as call) | ast.AugAssign(value=ast.Call() as call) | (ast.Call() as call):
            sources = [] if source_location.called(call) == "len" else [*call.args, *(k.value for k in call.keywords)]
        case _:
            return False
    names = (each for source in sources for each in ast.walk(source) if isinstance(each, ast.Name | ast.Attribute))
    return any(_value(each, frame) is loader for each in names)


def _leads_to(read: ast.AST, mean: ast.expr) -> bool:
    """Return whether the dividend comes from this reading: it contains the reading, or a name that the reading sets."""
    if any(each is read for each in ast.walk(mean)):
        return True
    names = {ast.unparse(each) for each in ast.walk(mean) if isinstance(each, ast.Name | ast.Attribute)}
    stored = (each for each in ast.walk(read) if isinstance(getattr(each, "ctx", None), ast.Store))
    return isinstance(read, ast.stmt) and not names.isdisjoint(map(ast.unparse, stored))


def _function_around(tree: ast.Module, frame: FrameType) -> ast.AST:
    functions = (
        each
        for each in ast.walk(tree)
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
        and each.name == frame.f_code.co_name
        and each.lineno <= frame.f_lineno <= (each.end_lineno or 0)
    )
    return next(functions, tree)


def _is_number_of_samples(divisor: ast.expr, loader: DataLoader[Any], frame: FrameType) -> bool:
    match divisor:
        case ast.Call(func=ast.Name(id="float" | "int"), args=[number]):
            return _is_number_of_samples(number, loader, frame)
        case ast.Call(func=ast.Name(id="len"), args=[ast.Attribute(attr="dataset" | "sampler", value=of)]):
            return _value(of, frame) is loader
        case ast.Call(func=ast.Name(id="len"), args=[of]):
            return _value(of, frame) is loader.dataset
        case ast.Name() | ast.Attribute() | ast.Subscript():
            number = _value(divisor, frame)
            return type(number) is int and number > 1 and number == _length(loader)
    return False


def _value(node: ast.expr, frame: FrameType) -> Any:
    """Return the value of a name, a plain attribute or an item of a dict; None if there is none."""
    match node:
        case ast.Name(id=name):
            return frame.f_locals.get(name, frame.f_globals.get(name))
        case ast.Attribute(value=of, attr=name):
            return getattr(_value(of, frame), "__dict__", {}).get(name)
        case ast.Subscript(value=of, slice=key):
            items, found = _value(of, frame), key.value if isinstance(key, ast.Constant) else _value(key, frame)
            return items.get(found) if type(items) is dict and isinstance(found, str | int) else None
    return None


def _length(loader: DataLoader[Any]) -> int:
    try:
        return len(loader.dataset)  # type: ignore[arg-type]
    except TypeError:
        return 0
