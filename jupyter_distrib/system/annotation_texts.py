"""The names in type annotations that are strings: `x: "Net"`, and all of them after `from __future__ import
annotations`.

`typing.get_type_hints` and the parsers and validators built on it look these names up when they are called. Any
process; pure.
"""

from __future__ import annotations

import ast
import inspect
import types
import typing
from collections.abc import Iterable, Iterator

_VALUES = frozenset({"Literal", "Annotated"})
"""Types with values in their brackets; only the first part of `Annotated` is a type."""


def names_of(definition: types.FunctionType | type) -> set[str]:
    """Return the names in the string annotations of a function or class."""
    try:
        annotations = inspect.get_annotations(definition)
    except Exception:  # noqa: BLE001 - foreign code: some metaclasses, and since Python 3.14 the annotations themselves
        return set()
    found: set[str] = set()
    for text in _texts_of(annotations.values()):
        if (expression := parsed(text)) is not None:
            found |= {node.id for part in (expression, *nested(expression)) for node in _names(part)}
    return found


def nested(annotation: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions in the strings inside an annotation, such as `Net` of `Optional["Net"]`."""
    match annotation:
        case ast.Constant(value=str(text)):
            if (expression := parsed(text)) is not None:
                for node in ast.walk(expression):
                    ast.copy_location(node, annotation)
                yield expression
                yield from nested(expression)
        case ast.Subscript(value=ast.Name(id=name) | ast.Attribute(attr=name), slice=inside) if name in _VALUES:
            first = inside.elts[:1] if isinstance(inside, ast.Tuple) else [inside]
            if name == "Annotated":
                yield from nested(first[0])
        case _:
            for child in ast.iter_child_nodes(annotation):
                yield from nested(child)


def parsed(text: str) -> ast.expr | None:
    """Return the expression in a string; None if it is not an expression."""
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _names(expression: ast.expr) -> Iterator[ast.Name]:
    return (node for node in ast.walk(expression) if isinstance(node, ast.Name))


def _texts_of(annotations: Iterable[object]) -> Iterator[str]:
    for each in annotations:
        if isinstance(each, str):
            yield each
        elif isinstance(each, typing.ForwardRef):
            yield each.__forward_arg__
        elif isinstance(each, types.GenericAlias | types.UnionType) or type(each).__module__ == "typing":
            origin, parts = typing.get_origin(each), typing.get_args(each)
            if origin is not typing.Literal:
                yield from _texts_of(parts[:1] if origin is typing.Annotated else parts)
