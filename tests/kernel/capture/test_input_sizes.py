"""Which variables make a cell's inputs large."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.notebook import Notebook

pytestmark = pytest.mark.slow  # the quick tests have enough of kernels and ranks without these

ON_ONE = "%%distributed --ranks 1\n"


@pytest.fixture
def book(shared_notebook: Notebook) -> Iterator[Notebook]:
    """The kernel of this module, without the names of other tests."""
    yield shared_notebook
    shared_notebook.forget()


def test_a_large_variable_that_a_function_reads_is_named_with_the_way_to_it(book: Notebook) -> None:
    book.ok(
        "import torch\ndata = torch.zeros(26_000_000)\ndef batch(): return data[:1]\n"
        "def train(): return batch()\ndef evaluate(): return batch()"
    )

    outcome = book.ok(ON_ONE + "(train(), evaluate());")

    assert outcome.stdout == (
        "`data` (104.0 MB, used by train -> batch) is captured and sent once per node. "
        "Load it in the cell to avoid this.\n"
    )


def test_variables_that_are_large_together_are_named_the_largest_first(book: Notebook) -> None:
    book.ok("import torch\na = torch.zeros(13_000_000)\nb = torch.zeros(15_000_000)\nalias = a\nsmall = 1")

    outcome = book.ok(ON_ONE + "(a, b, alias, small) and None")

    assert outcome.stdout == (
        "`b` (60.0 MB) and `a` (52.0 MB) are captured and sent once per node. Load them in the cell to avoid this.\n"
    )


def test_a_function_that_holds_much_itself_is_named(book: Notebook) -> None:
    book.ok("import torch\ndef make(data): return lambda: data.numel()\ncount = make(torch.zeros(26_000_000))")

    assert book.ok(ON_ONE + "count()").stdout.startswith("`count` (104.0 MB) is captured")


def test_many_small_variables_are_told_as_a_sum(book: Notebook) -> None:
    names = [f"part_{i}" for i in range(15)]
    book.ok("".join(f"{name} = bytes(7_000_000)\n" for name in names))

    outcome = book.ok(ON_ONE + f"({', '.join(names)}) and None")

    assert (
        outcome.stdout
        == "15 variables (105.0 MB) are captured and sent once per node. Load them in the cell to avoid this.\n"
    )


def test_a_view_of_a_large_storage_is_not_large(book: Notebook) -> None:
    book.ok("import torch\nview = torch.zeros(50_000_000)[:10]\nlarge = torch.zeros(26_000_000)")

    assert book.ok(ON_ONE + "(view, large) and None").stdout.startswith("`large` (104.0 MB) is captured")
