"""`# distributed: ...` as a cell's first line."""

from __future__ import annotations

from textwrap import dedent

import pytest

from jupyter_distrib.kernel.notebook.comment_syntax import magic_line, transform
from tests.notebook import Notebook


@pytest.mark.parametrize(
    ("line", "magic"),
    [
        ("# distributed: --gpus 8 --strategy ddp", "%%distributed --gpus 8 --strategy ddp"),
        ("#distributed:--ranks 2\n", "%%distributed --ranks 2"),
        ("# distributed:", "%%distributed"),
        ("# distributed: this cell computes the mean", None),
        ("# distributed training", None),
        ("x = 1  # distributed: --ranks 2", None),
    ],
)
def test_only_options_make_the_comment_a_magic(line: str, magic: str | None) -> None:
    assert magic_line(line) == magic


def test_lines_keep_their_numbers() -> None:
    cell = ["\n", "\n", "# distributed: --ranks 2\n", "a = 1\n", "b = 2"]
    assert transform(cell) == ["%%distributed --ranks 2\n", "\n", "\n", "a = 1\n", "b = 2"]


def test_only_the_first_line_counts() -> None:
    cell = ["a = 1\n", "# distributed: --ranks 2\n"]
    assert transform(cell) == cell
    assert transform([]) == []


@pytest.mark.parametrize("magic", ["%%distributed --ranks 2", "%%distrib"])
def test_the_magic_may_stand_below_comments(magic: str) -> None:
    assert transform(["# %%\n", "\n", f"{magic}\n", "a = 1"]) == [f"{magic}\n", "# %%\n", "\n", "a = 1"]
    for cell in (["# %%\n"], ["# %%\n", "%%time\n", "a"], ["a = 1\n", f"{magic}\n"], [f"{magic}\n", "a"]):
        assert transform(cell) == cell


@pytest.fixture
def book(shared_notebook: Notebook) -> Notebook:
    shared_notebook.ok("%load_ext jupyter_distrib")
    return shared_notebook


def test_the_comment_does_what_the_magic_does(book: Notebook) -> None:
    cell = dedent("""\
        # distributed: --ranks 2
        print('here')
        rank""")
    assert book.ok(cell).result == book.ok("%%distributed --ranks 2\nrank").result


def test_a_cell_that_begins_with_a_comment_is_distributed(book: Notebook) -> None:
    assert "line 4" in book.fails("# Train it.\n\n%%distributed --ranks 2\n1 / 0").traceback


def test_errors_name_the_front_ends_lines(book: Notebook) -> None:
    outcome = book.fails(
        dedent("""
            # distributed: --ranks 2
            x = 1

            1 / 0""")
    )
    assert outcome.ename == "ZeroDivisionError"
    assert "line 5" in outcome.traceback


def test_inside_a_distributed_cell_it_is_a_comment(book: Notebook) -> None:
    cell = dedent("""\
        %%distributed --ranks 2
        # distributed: --ranks 3
        rank""")
    assert "0" in book.ok(cell).result


def test_a_wrong_option_is_said_as_for_the_magic(book: Notebook) -> None:
    assert book.fails("# distributed: --rnaks 2\nrank").ename == "OptionsError"


def test_unloading_makes_it_a_comment_again(book: Notebook) -> None:
    book.ok("%unload_ext jupyter_distrib")
    assert book.ok("# distributed: --ranks 2\n6 * 7").result == "42"


def test_options_are_completed_behind_it(book: Notebook) -> None:
    code = "# distributed: --strat"
    reply = book.client.complete(code, len(code), reply=True, timeout=30)
    assert "--strategy" in reply["content"]["matches"]
