"""The language of README and docs: sentences that can be read at once, and words as the glossary has them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import mistune
import pytest

from tests.notebook import ROOT

MOST_WORDS = 40
"""The length of a sentence, or of a part of it that ends with a colon or a semicolon. Code counts as one word. A longer
one is two sentences; a tighter limit would be met by leaving out subjects."""
PAGES = sorted(
    path.relative_to(ROOT) for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"))
)
_END = re.compile(r"(?<=[.!?:;·])\s+")
_MADE_BY_A_PROGRAM = re.compile(r"<!-- (figures|options|guesses) -->.*?<!-- /\1 -->", re.DOTALL)


def texts(tokens: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield each paragraph, heading and cell of a table."""
    for token in tokens:
        if token["type"] in {"paragraph", "block_text", "heading", "table_cell"}:
            yield "".join(words(token.get("children", ())))
        elif "children" in token:
            yield from texts(token["children"])


def words(tokens: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for token in tokens:
        match token["type"]:
            case "text":
                yield token["raw"]
            case "codespan":
                yield re.sub(r"\s", "_", f"`{token['raw']}`")
            case "softbreak" | "linebreak":
                yield " "
            case "image":
                pass
            case _:
                yield from words(token.get("children", ()))


def long_sentences(markdown: str) -> list[str]:
    parse = mistune.create_markdown(renderer=None, plugins=["table"])
    tokens = parse(_MADE_BY_A_PROGRAM.sub("", markdown))
    sentences = (sentence for text in texts(tokens) for sentence in _END.split(text))
    return [sentence for sentence in sentences if len(sentence.split()) > MOST_WORDS]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_sentences_can_be_read_at_once(page: Path) -> None:
    assert long_sentences((ROOT / page).read_text("utf-8")) == [], f"more than {MOST_WORDS} words: make two sentences"


def test_long_sentences_are_found_in_paragraphs_lists_and_tables() -> None:
    long = " ".join(["word"] * MOST_WORDS)
    short = f"{long}: `a b c`."
    assert long_sentences(f"{short}\n\n- {long} more\n\n|a|\n|-|\n|{long} more|\n") == [f"{long} more"] * 2


def test_the_glossary_has_few_words_and_each_is_used() -> None:
    glossary = (ROOT / "docs/glossary.md").read_text("utf-8")
    entries = re.findall(r"^\| ([a-z ]+) \| (?!meaning)", glossary, re.MULTILINE)
    assert 0 < len(entries) == len(set(entries)) <= 25
    others = [path for path in (ROOT / "docs").glob("*.md") if path.name != "glossary.md"]
    prose = " ".join(path.read_text("utf-8") for path in others).lower()
    assert [word for word in entries if not re.search(rf"\b{word}", prose)] == []
