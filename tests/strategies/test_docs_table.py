"""docs/strategies.md holds the table of what the tests check."""

from __future__ import annotations

from jupyter_distrib.worker.autoparallel import heuristics
from tests.notebook import ROOT
from tests.strategies.cases import table


def test_the_table_is_that_of_the_tests() -> None:
    text = (ROOT / "docs" / "strategies.md").read_text(encoding="utf-8")

    assert text.partition("<!-- cases -->\n")[2].partition("<!-- /cases -->")[0] == table() + "\n"


def test_the_table_of_guesses_is_that_of_the_code() -> None:
    text = (ROOT / "docs" / "strategies.md").read_text(encoding="utf-8")

    assert text.partition("<!-- guesses -->\n")[2].partition("<!-- /guesses -->")[0] == heuristics.table() + "\n"
