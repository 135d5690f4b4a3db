"""Docstrings of the package begin with a verb or a noun, and say it as a colleague would, as do its messages and the
docs; read from the sources without importing them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.notebook import ROOT
from tests.repository.package_code import trees, walked
from tests.repository.test_language import PAGES

BAD_BEGINNING = re.compile(
    r"(Of|Those|Who|Whom|Whose|Whoever|What|Which|How|Why|Where|Until|As|From|(By|With|In|On|To|For) (which|whom))\b"
)
BAD_BEGINNING_OF_FUNCTION = re.compile(r"Whether\b")
"""Fields and flags may begin so; a function is to say `Return whether ...`."""
UNSPOKEN = re.compile(
    r"\b(?:those|what) (?:that|which|whose)\b|\bof theirs\b|\b(?:is|are|was|were|been) told\b(?! apart)|\bsince so many\b"
    r"|\bthe (?:most|least) (?:seconds|bytes|characters|ranks|runs)\b|\bwho(?:ever)? (?:waits|wants|asks)\b",
    re.IGNORECASE,
)
"""Grammar that hides the subject or the object: nobody would say it aloud."""


def docstrings(tree: ast.AST) -> Iterator[tuple[ast.AST, ast.Constant]]:
    """Yield each string that stands alone, with what it stands in: docstrings, and those under attributes."""
    for node in walked(tree):
        for child in ast.iter_child_nodes(node) if hasattr(node, "body") else ():
            match child:
                case ast.Expr(value=ast.Constant(value=str()) as text):
                    yield node, text


def bad_beginnings(tree: ast.AST) -> list[str]:
    bad = []
    for node, text in docstrings(tree):
        first = text.value.strip().partition("\n")[0]
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.body[0].lineno == text.lineno
        if BAD_BEGINNING.match(first) or (is_function and BAD_BEGINNING_OF_FUNCTION.match(first)):
            bad.append(f"line {text.lineno}: {first}")
    return bad


def unspoken(tree: ast.AST) -> list[str]:
    """Return the paragraphs of docstrings, and the other strings, such as messages, that have such grammar."""
    paragraphs = {id(text): text.value.split("\n\n") for _, text in docstrings(tree)}
    texts = (
        (node.lineno, " ".join(paragraph.split()))
        for node in walked(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for paragraph in paragraphs.get(id(node), [node.value])
    )
    return [f"line {line}: {text}" for line, text in texts if UNSPOKEN.search(text)]


def unspoken_in_prose(markdown: str) -> list[str]:
    paragraphs = (" ".join(paragraph.split()) for paragraph in re.sub(r"`[^`\n]*`", "`x`", markdown).split("\n\n"))
    return [f"{found.group()}: {each[:60]}" for each in paragraphs for found in UNSPOKEN.finditer(each)]


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    bad = []
    for name, tree in trees().items():
        bad += [f"{name}, {each}" for each in bad_beginnings(tree)]
    assert bad == []


def test_docstrings_are_said_as_one_would_say_them_aloud() -> None:
    bad = []
    for name, tree in trees().items():
        bad += [f"{name}, {each}" for each in unspoken(tree)]
    assert bad == []


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_pages_are_said_as_one_would_say_them_aloud(page: Path) -> None:
    assert unspoken_in_prose((ROOT / page).read_text("utf-8")) == []


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
    assert len(bad_beginnings(ast.parse(source))) == 1


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
    assert bad_beginnings(ast.parse(source)) == []


@pytest.mark.parametrize(
    "source",
    [
        'def f():\n    """Return the ranks, and those that are gone."""',
        'def f():\n    """Return the number to look for, since so many\n    are refused."""',
        'class Node:\n    lost = 5.0\n    """The most seconds to wait."""',
        'class Node:\n    """Who waits for it is told the reason."""',
        'def f():\n    """Return the run of theirs."""',
        'def f():\n    """Return the ranks.\n\n    Those that are left go on."""',
        'raise ValueError("the pool was told to end")',
    ],
)
def test_grammar_that_nobody_would_say_is_found(source: str) -> None:
    assert len(unspoken(ast.parse(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        'def f():\n    """Return the ranks that are gone.\n\n    The others go on."""',
        'def f():\n    """Return the thread that waits, by which runs are told apart."""',
        'TIMEOUT_S = 5.0\n"""Maximum seconds to wait."""',
    ],
)
def test_plain_grammar_passes(source: str) -> None:
    assert unspoken(ast.parse(source)) == []


def test_grammar_that_nobody_would_say_is_found_in_a_page() -> None:
    page = "The ranks go on, even those\nthat are late.\n\n| `those that` | who waits |\n"
    assert [each.partition(":")[0] for each in unspoken_in_prose(page)] == ["those that", "who waits"]
