"""Modules inside modules that a cell reads as attributes."""

from __future__ import annotations

import ast
import logging.handlers
import os
import xml.dom.minidom
from types import ModuleType

import pytest

from jupyter_distrib.kernel.capture.capture import read_submodules


@pytest.mark.parametrize(
    ("cell", "found"),
    [
        ("logging.handlers.QueueHandler(q)", ("logging.handlers",)),
        ("xml.dom.minidom.parseString(text)", ("xml.dom", "xml.dom.minidom")),
        ("def f():\n    return [xml.dom.Node for _ in x]", ("xml.dom",)),
        ("logging.getLogger()", ()),
        ("xml.sax_is_not_there", ()),
        ("other.logging.handlers", ()),
        ("os.path.join(a)", ()),
    ],
)
def test_loaded_modules_on_the_way_of_an_attribute_are_found(cell: str, found: tuple[str, ...]) -> None:
    """`os.path` is a module of another name, which `import os` brings by itself."""
    values: dict[str, object] = {"logging": logging, "xml": xml, "os": os, "other": object()}
    assert logging.handlers
    assert xml.dom.minidom
    assert tuple(name for names in read_submodules(ast.parse(cell), values).values() for name in names) == found


def test_what_is_not_a_module_costs_no_look() -> None:
    assert read_submodules(ast.parse("x.y.z"), {"x": 1}) == {}
    assert read_submodules(ast.parse("x.y.z"), {"x": ModuleType("nowhere")}) == {}
