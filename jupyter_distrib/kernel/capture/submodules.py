"""The modules inside modules that a cell reads as attributes. Kernel side, pure.

`import torch.distributed.checkpoint` in the notebook binds `torch` alone; the cell reads
`torch.distributed.checkpoint.save`."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType


def read_submodules(program: ast.AST, values: Mapping[str, object]) -> dict[str, tuple[str, ...]]:
    """Return the loaded modules inside each value's module that the program reads, by the value's name."""
    modules = {name: value for name, value in values.items() if isinstance(value, ModuleType)}
    if not modules:
        return {}
    found: dict[str, dict[str, None]] = {}
    for base, attributes in _chains(program):
        if base in modules:
            found.setdefault(base, {}).update(dict.fromkeys(_loaded(modules[base], attributes)))
    return {name: tuple(names) for name, names in found.items() if names}


def _chains(program: ast.AST) -> Iterator[tuple[str, list[str]]]:
    """Yield the name and the attributes of every `name.attribute.attribute`."""
    for node in ast.walk(program):
        attributes: list[str] = []
        while isinstance(node, ast.Attribute):
            attributes.append(node.attr)
            node = node.value
        if attributes and isinstance(node, ast.Name):
            yield node.id, attributes[::-1]


def _loaded(module: ModuleType, attributes: list[str]) -> Iterator[str]:
    """Yield the names of the modules among the attributes, from the outside in."""
    for attribute in attributes:
        name = f"{module.__name__}.{attribute}"
        inner = getattr(module, attribute, None)
        if not isinstance(inner, ModuleType) or inner.__name__ != name or sys.modules.get(name) is not inner:
            return
        yield name
        module = inner
