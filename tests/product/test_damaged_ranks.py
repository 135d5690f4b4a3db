"""Cells that damage the process of their own rank: each ends with its value or with a clear sentence, the next cell works,
and Stop ends what does not."""

from __future__ import annotations

import pytest

from tests.notebook import Notebook

pytestmark = pytest.mark.slow  # the quick tests have enough of kernels and ranks without these

GOOD = """%%distributed --ranks 2 --strategy ddp
import sys, torch, torch.distributed as dist
t = torch.ones(1)
dist.all_reduce(t)
print("to stdout", rank)
print("to stderr", rank, file=sys.stderr)
int(t)"""
OUTPUT = ("[0] to stdout 0", "[1] to stdout 1", "[0!] to stderr 0", "[1!] to stderr 1")
NULL = "os.open(os.devnull, os.O_RDWR)"
STREAMS = {
    "closes 0": "os.close(0)",
    "closes 1": "os.close(1)",
    "closes 2": "os.close(2)",
    "closes all": "os.closerange(0, 3)",
    "redirects 1": f"os.dup2({NULL}, 1)",
    "redirects 2": f"os.dup2({NULL}, 2)",
    "opens another file as 1": f"os.close(1); kept = {NULL}",
    "closes sys.stdout": "sys.stdout.close()",
    "closes sys.stderr": "sys.stderr.close()",
    "detaches sys.stdout": "sys.stdout.detach()",
    "takes sys.stdout away": "sys.stdout = None",
    "takes all streams away": "sys.stdin = sys.__stdin__ = sys.stdout = sys.__stdout__ = sys.stderr = sys.__stderr__ = None",
}


@pytest.fixture
def book(shared_notebook: Notebook) -> Notebook:
    return shared_notebook


def assert_next_is_good(book: Notebook) -> None:
    outcome = book.ok(GOOD)
    assert outcome.result == "ranks 0-1: 2"
    assert [line for line in OUTPUT if line not in outcome.view] == []


@pytest.mark.parametrize("how", STREAMS)
def test_a_cell_after_one_that_damaged_the_standard_streams_has_its_own(book: Notebook, how: str) -> None:
    before = book.ok("%%distributed --ranks 2\nimport os\nos.getpid()").result

    assert book.ok(f"%%distributed --ranks 2\nimport os, sys\n{STREAMS[how]}\n1").result == "ranks 0-1: 1"

    assert_next_is_good(book)
    read = (
        "%%distributed --ranks 2\nimport os, sys\nassert os.read(0, 1) == b'' and not sys.stdin.isatty()\nos.getpid()"
    )
    assert book.ok(read).result == before


def test_what_a_cell_has_printed_to_a_stream_that_it_closed_is_shown(book: Notebook) -> None:
    outcome = book.fails("%%distributed --ranks 2\nimport os\nos.close(1)\nprint('late')")

    assert outcome.ename == "OSError"
    assert "[0-1] late" in outcome.view
    assert_next_is_good(book)


def test_a_rank_whose_standard_output_has_become_a_connection_is_replaced(book: Notebook) -> None:
    """To give it a new one would close the connection under whoever uses it."""
    cell = "%%distributed --ranks 2\nimport os, socket\nos.close(1)\nkept = socket.socketpair()\n1"

    outcome = book.fails(cell)

    assert "closed its standard output (file descriptor 1)" in outcome.evalue
    assert_next_is_good(book)
