"""The debugger of a rank, by a real kernel whose client answers its requests for input."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from tests.notebook import Notebook, Outcome

pytestmark = pytest.mark.slow
ON_TWO = "%%distributed --ranks 2\n"
FAILS = (
    ON_TWO
    + """\
def divide(total, parts):
    shares = []
    for part in parts:
        shares.append(total / part)
    return shares
data = bytearray(10)
divide(12 + rank, [3, rank - 1])"""
)

WATCHED = """\
import sys, weakref
class Big: pass
def fail():
    big = Big()
    sys.big = weakref.ref(big)
    1 / 0
fail()"""


@pytest.fixture
def book(shared_notebook: Notebook) -> Iterator[Notebook]:
    yield shared_notebook
    shared_notebook.forget()


def debugged(book: Notebook, code: str, *lines: str, prompt: str = "(Pdb) ") -> Outcome:
    """Run a cell, answer its questions with these lines, and wait for its end."""
    book.start(code, keyboard=True)
    book.types(*lines, prompt=prompt)
    return book.finish()


# ---------------------------------------------------------------------------------------------------- after a failure


def test_a_failure_is_examined_in_the_rank_that_failed(book: Notebook) -> None:
    assert book.fails(FAILS).ename == "ZeroDivisionError"

    shown = debugged(book, "%distributed_debug", "p part", "p total", "u", "len(data)", "rank", "w", "q").stdout

    assert shown.startswith("rank 1: ZeroDivisionError: ")
    assert "-> shares.append(total / part)" in shown
    answers = shown.splitlines()
    assert answers.index("0") < answers.index("13") < answers.index("10") < answers.index("1")
    assert "divide(12 + rank, [3, rank - 1])" in shown  # by `w`, and nothing around the cell
    assert "execution.py" not in shown


def test_what_a_failure_has_left_is_kept_until_the_next_cell(book: Notebook) -> None:
    book.fails(FAILS)
    for _ in range(2):
        assert "\n13\n" in debugged(book, "%distributed_debug 1", "p total", "q").stdout

    book.ok(ON_TWO + "1")
    assert "no rank of the last run" in book.fails("%distributed_debug").text


def test_memory_of_a_failure_is_there_while_it_is_kept_and_gone_afterwards(book: Notebook) -> None:
    watched = ON_TWO + WATCHED
    book.fails(watched)
    assert debugged(book, "%distributed_debug", "p sys.big() is big", "q").stdout.count("True") == 1
    assert "None" in book.ok(ON_TWO + "import sys\nstr(sys.big())").result

    book.fails(watched)
    book.ok("%distributed_debug --done")
    book.start("%distributed_debug", keyboard=True)
    assert "keeps no failure" in book.finish().text


def test_a_rank_that_keeps_nothing_is_refused_with_a_sentence(book: Notebook) -> None:
    book.fails(
        ON_TWO
        + dedent("""\
            if rank == 1: raise ValueError('one')
            import time
            time.sleep(60)""")
    )
    assert "rank 0 cannot be debugged: only rank 1 of run" in book.fails("%distributed_debug 0").text
    assert "must be a rank, counted from 0" in book.fails("%distributed_debug x").text


def test_a_front_end_without_input_is_refused_and_does_not_hang(book: Notebook) -> None:
    book.fails(FAILS)
    assert "this front end takes no input" in book.fails("%distributed_debug").text


def test_a_long_expression_is_interrupted_and_the_prompt_stays(book: Notebook, tmp_path: Path) -> None:
    os.mkfifo(begun := tmp_path / "begun")
    book.fails(FAILS)
    book.start("%distributed_debug", keyboard=True)
    book.types(f"import time; open({str(begun)!r}, 'w').close(); time.sleep(60)")
    begun.read_text()  # blocks until the rank has come so far
    book.interrupt()
    book.types("p 6 * 7", "q")

    assert "42" in book.finish().stdout


def test_the_end_of_input_and_an_interrupt_end_the_examination(book: Notebook) -> None:
    book.fails(FAILS)
    book.start("%distributed_debug", keyboard=True)
    book.asked()
    book.client.input("\x04")  # how clients tell the end of input
    assert book.finish().status == "ok"

    book.start("%distributed_debug", keyboard=True)
    book.asked()
    book.interrupt()
    assert book.finish().status == "ok"
    assert book.ok(ON_TWO + "rank").result


def test_a_rank_that_dies_while_it_is_examined_ends_the_prompt(book: Notebook) -> None:
    book.fails(FAILS)
    record = "from jupyter_distrib.kernel.session.session import current\ncurrent().history[-1].record"
    pid = int(book.ok(f"{record}.ranks[1].pid").result)
    book.start("%distributed_debug", keyboard=True)
    book.asked()
    os.kill(pid, signal.SIGKILL)

    assert "rank 1 has ended" in book.finish().text
    assert book.ok(ON_TWO + "rank").result


def test_the_option_debug_opens_the_prompt_before_the_cell_fails(book: Notebook) -> None:
    cell = FAILS.replace("--ranks 2", "--ranks 2 --debug")
    outcome = debugged(book, cell, "p total", "q")
    assert "\n13\n" in outcome.stdout
    assert outcome.ename == "ZeroDivisionError"

    assert "--debug: the debugger cannot ask you anything" in book.fails(cell).stdout
    assert "exclude each other" in book.fails("%%distributed --ranks 2 --debug --detach\n1").text


def test_a_distributed_function_opens_the_prompt_too(book: Notebook) -> None:
    book.ok(
        dedent("""\
            from jupyter_distrib import distributed
            @distributed(ranks=2, debug=True)
            def f(x): return x / (rank - 1)""")
    )
    outcome = debugged(book, "f.distributed(7)", "p x", "q")
    assert "\n7\n" in outcome.stdout
    assert outcome.ename == "ZeroDivisionError"
