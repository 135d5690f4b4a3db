"""The words of newcomers lead to answers: the site's search shows pages that have all of them."""

from __future__ import annotations

import re

import pytest

from tests.notebook import ROOT

DOCS = ROOT / "docs"
ASKED = {
    "choose gpus": "faq",
    "select gpus": "faq",
    "only 4 gpus": "faq",
    "hang epoch": "faq",
    "cell stuck": "faq",
    "freeze": "faq",
    "deadlock": "errors",
    "nccl timeout": "troubleshooting",
    "one rank raises": "faq",
    "one rank fails": "faq",
    "get trained model": "faq",
    "return model": "faq",
    "save weights": "faq",
    "remote machine": "cloud",
    "multi node": "cloud",
    "multiple machines": "faq",
    "kaggle": "containers",
    "sagemaker": "containers",
    "stop run": "faq",
    "cancel": "faq",
    "resume after crash": "faq",
    "continue training": "faq",
    "validation loss different": "faq",
    "wrong accuracy": "troubleshooting",
    "effective batch size": "faq",
    "huggingface trainer": "faq",
    "hugging face trainer": "frameworks",
    "add a pool": "pools",
    "out of memory": "troubleshooting",
    "OOM": "faq",
    "free gpu memory": "faq",
    "mixed precision": "faq",
    "gradient accumulation": "faq",
    "reproducible": "faq",
    "random seed": "faq",
    "vscode": "faq",
    "mps": "faq",
    "early stopping": "faq",
    "export script": "faq",
    "close laptop": "faq",
    "variable not defined": "troubleshooting",
    "download data once": "faq",
    "syncbatchnorm": "faq",
    "create pool": "faq",
    "torch.compile": "faq",
    "port in use": "troubleshooting",
}
"""What is typed, and the page that is to be found. All the words must be there, or begin one that is."""


@pytest.mark.parametrize(("words", "page"), ASKED.items())
def test_a_page_has_all_the_words_that_one_would_type(words: str, page: str) -> None:
    text = (DOCS / f"{page}.md").read_text("utf-8").lower()
    missing = [word for word in words.lower().split() if not re.search(rf"\b{re.escape(stem(word))}", text)]
    assert missing == []


def stem(word: str) -> str:
    """The word as the search's stemmer has it, nearly: that of "stopping" is "stop"."""
    return re.sub(r"(?<=\w{4})(ping|ing|es|s|ed|e)$", "", word)


def test_each_page_that_the_search_moves_up_or_down_exists() -> None:
    copied = re.findall(r'": "(\w+)\.md"', (DOCS / "conf.py").read_text("utf-8"))
    pages = {path.stem for path in DOCS.glob("*.md")} | set(copied)
    patterns = re.findall(r"/\^\((.*?)\)\$/", (DOCS / "searching.js").read_text("utf-8"))
    assert len(patterns) == 2
    named = [name for pattern in patterns for name in pattern.split("|")]
    assert [name for name in named if not any(re.fullmatch(name, page) for page in pages)] == []
