"""Docstrings of the package begin with a verb or a noun; read from the sources without importing them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent.parent / "jupyter_distrib"

BAD_BEGINNING = re.compile(
    r"(Of|Those|Who|Whom|Whose|Whoever|What|Which|How|Why|Where|Until|As|From|(By|With|In|On|To|For) (which|whom))\b"
)
BAD_BEGINNING_OF_FUNCTION = re.compile(r"Whether\b")
"""Fields and flags may begin so; a function is to say `Return whether ...`."""


def docstrings(tree: ast.AST) -> Iterator[tuple[ast.AST, ast.Constant]]:
    """Yield each string that stands alone, with what it stands in: docstrings, and those under attributes."""
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            match child:
                case ast.Expr(value=ast.Constant(value=str()) as text):
                    yield node, text


def bad_beginnings(source: str) -> list[str]:
    bad = []
    for node, text in docstrings(ast.parse(source)):
        first = text.value.strip().partition("\n")[0]
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.body[0].lineno == text.lineno
        if BAD_BEGINNING.match(first) or (is_function and BAD_BEGINNING_OF_FUNCTION.match(first)):
            bad.append(f"line {text.lineno}: {first}")
    return bad


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    bad = []
    for file in sorted(FOLDER.rglob("*.py")):
        name = file.relative_to(FOLDER).as_posix()
        bad += [f"{name}, {each}" for each in bad_beginnings(file.read_text(encoding="utf-8"))]
    assert bad == []


@pytest.mark.parametrize(
    "source",
    [
        '"""How a module is sharded."""',
        'class Node:\n    """What one rank waits in."""',
        'def version():\n    """Of an installed package; empty if it is not installed."""',
        'async def f():\n    """Whether it is there."""',
        'class Node:\n    @property\n    def busy(self):\n        """Whether it is busy."""',
        'def f():\n    x = 1\n    """By which the others reach it."""',
        'TELL_S = 5.0\n"""Who still waits after this is told what for."""',
        'class Node:\n    def __init__(self):\n        if True:\n            self.ranks = []\n            """Those that run."""',
    ],
)
def test_a_bad_beginning_is_found(source: str) -> None:
    assert len(bad_beginnings(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        '"""Howitzers, offers and everything else that only begins with the same letters."""',
        'def f():\n    """Return whether it is there."""',
        'class Node:\n    lost = False\n    """Whether it is out of reach."""',
        'class Node:\n    """With `--keep`, values stay on the ranks."""',
        'def f():\n    """Return the nodes.\n\n    Of two nodes the first is taken."""',
        'print("What is this?")\ntext = "Of course."',
    ],
)
def test_other_strings_pass(source: str) -> None:
    assert bad_beginnings(source) == []
