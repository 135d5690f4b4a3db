"""The names that a cell reads through string literals, as in `'model' in globals()`, `globals()['model']` or `eval('2 *
x')`, or through `__main__.x`. Pure: in the kernel's main thread; executes nothing of the cell."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

MARK = re.compile(r"(?<![\w.])(globals|locals|vars|dir|eval|exec)\s*\(|__main__|user_ns|user_global_ns")
"""Matches the source of every cell that has such an expression."""
_OF_SCOPE = ("locals", "vars", "dir")
"""Functions that give the names of the notebook outside of functions and classes."""
_LOOKUPS = ("get", "pop", "setdefault", "__getitem__", "__contains__")


def add(program: ast.Module) -> None:
    """Add names that a cell reads through string literals, such as `eval('x')`, to the analysis, as names that may be
    read. A string that the cell computes is not found, nor a literal in a very deep expression."""
    with suppress(RecursionError):
        _NamesInTexts().visit(program)


class _NamesInTexts(ast.NodeTransformer):
    def __init__(self) -> None:
        self._depth = 0
        """Number of functions and classes around this point."""

    def visit(self, node: ast.AST) -> Any:
        names = _names(node, in_module=self._depth == 0)
        is_scope = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda)
        self._depth += is_scope
        visited = super().visit(node)
        self._depth -= is_scope
        return _with_names(visited, names) if names else visited


def _with_names(node: Any, names: Iterable[ast.expr]) -> ast.AST:
    nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
    later = ast.Lambda(args=nothing, body=ast.Tuple(elts=list(names), ctx=ast.Load()))
    both = ast.Tuple(elts=[node, later], ctx=ast.Load())
    return ast.fix_missing_locations(ast.copy_location(both, node))


def _names(node: ast.AST, *, in_module: bool) -> list[ast.expr]:
    """Return the names that an expression reads through a string literal."""
    match node:
        case ast.Compare(left=ast.Constant(value=str(name)), ops=[ast.In() | ast.NotIn()], comparators=[names]) if (
            _are_names(names, in_module=in_module)
        ):
            return _name(name, node)
        case ast.Subscript(value=names, slice=ast.Constant(value=str(name)), ctx=ast.Load()) if _are_names(
            names, in_module=in_module
        ):
            return _name(name, node)
        case ast.Call(func=ast.Attribute(value=names, attr=method), args=[ast.Constant(value=str(name)), *_]) if (
            method in _LOOKUPS and _are_names(names, in_module=in_module)
        ):
            return _name(name, node)
        case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[module, ast.Constant(value=str(name)), *_]) if (
            _is_main(module)
        ):
            return _name(name, node)
        case ast.Attribute(value=module, attr=name, ctx=ast.Load()) if _is_main(module) and name[:2] != "__":
            return _name(name, node)
        case ast.Call(func=ast.Name(id="eval" | "exec"), args=[ast.Constant(value=str(text)), *others]) if all(
            _are_names(each, in_module=in_module) for each in others
        ):
            return _read_in(text, node)
    return []


def _name(name: str, node: ast.expr) -> list[ast.expr]:
    return [ast.copy_location(ast.Name(id=name, ctx=ast.Load()), node)] if name.isidentifier() else []


def _read_in(text: str, node: ast.expr) -> list[ast.expr]:
    try:
        parts = ast.walk(ast.parse(text.strip()))
    except (SyntaxError, ValueError, RecursionError):
        return []  # the rank reports the error
    read = {part.id for part in parts if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)}
    return [each for name in sorted(read) for each in _name(name, node)]


def _are_names(node: ast.expr, *, in_module: bool) -> bool:
    """Return whether an expression gives the notebook's names, or those names with their values."""
    match node:
        case ast.Call(func=ast.Name(id="globals"), args=[]):
            return True
        case ast.Call(func=ast.Name(id=function), args=[]):
            return in_module and function in _OF_SCOPE
        case ast.Call(func=ast.Name(id="vars" | "dir"), args=[module]):
            return _is_main(module)
        case ast.Call(func=ast.Attribute(value=names, attr="keys"), args=[]):
            return _are_names(names, in_module=in_module)
        case ast.Attribute(value=ast.Call(func=ast.Name(id="get_ipython")), attr="user_ns" | "user_global_ns"):
            return True
        case ast.Attribute(value=module, attr="__dict__"):
            return _is_main(module)
    return False


def _is_main(node: ast.expr) -> bool:
    """Return whether an expression gives the module `__main__`."""
    match node:
        case ast.Name(id="__main__"):
            return True
        case ast.Call(args=[ast.Constant(value="__main__")]):  # __import__, importlib.import_module
            return True
        case ast.Subscript(value=ast.Attribute(attr="modules"), slice=ast.Constant(value="__main__")):
            return True
    return False
