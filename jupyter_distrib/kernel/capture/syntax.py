"""Questions about pieces of Python's syntax. Pure."""

from __future__ import annotations

import ast


def arguments_of(arguments: ast.arguments) -> list[ast.arg]:
    """Return all parameters of a function."""
    starred = [argument for argument in (arguments.vararg, arguments.kwarg) if argument is not None]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *starred]


def is_constant(test: ast.expr, truth: bool) -> bool:
    """Return whether a condition is a constant with this truth."""
    return isinstance(test, ast.Constant) and bool(test.value) is truth


def mentions_name_error(caught: ast.expr | None) -> bool:
    """Return whether an `except` clause names NameError."""
    parts = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(isinstance(part, ast.Name) and part.id == "NameError" for part in parts)


def suppresses_exceptions(context: ast.expr) -> bool:
    """Return whether a context manager is `contextlib.suppress`, by its name."""
    function = context.func if isinstance(context, ast.Call) else None
    return getattr(function, "id", getattr(function, "attr", "")) == "suppress"
