"""A notebook on a kernel other than ipykernel: xeus-python, which JupyterLab offers beside it. A real kernel, real ranks."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent

import pytest

from tests.notebook import Notebook

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.skipif(find_spec("xpython_launcher") is None, reason="xeus-python is not installed: sh .ci/frameworks"),
]


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    folder: Path = tmp_path_factory.mktemp("xeus")
    with Notebook(folder, module="xpython_launcher") as book:
        assert not book.ok("%load_ext jupyter_distrib").text
        yield book


def test_plain_cells_stay_as_they_are(book: Notebook) -> None:
    assert book.ok("'plain'").text == "'plain'"


def test_a_cell_runs_on_every_rank(book: Notebook) -> None:
    book.ok("""
        import torch
        model = torch.nn.Linear(1, 1)""")

    outcome = book.ok(
        dedent("""\
            %%distributed --ranks 2
            print('heard')
            rank, list(model.state_dict())""")
    )

    assert outcome.result == "rank 0: (0, ['weight', 'bias'])\nrank 1: (1, ['weight', 'bias'])"
    assert "[0-1] heard" in outcome.view
    assert "is not set on" not in outcome.view, "the kernel's own logger is nothing to ranks"


def test_a_failed_cell_says_where(book: Notebook) -> None:
    outcome = book.fails("%%distributed --ranks 2\n1 / 0")

    assert "Cell In[" in outcome.traceback
    assert "----> 2 1 / 0" in outcome.traceback
    assert book.ok("%%distributed --ranks 2\nrank").result == "rank 0: 0\nrank 1: 1"


def test_an_interrupt_stops_the_ranks(book: Notebook) -> None:
    book.start(
        dedent("""\
            %%distributed --ranks 2
            import time
            print('begun')
            time.sleep(600)""")
    )
    book.until("begun")
    book.manager.interrupt_kernel()

    assert "Stopped by you" in book.finish().text
    assert book.ok("%%distributed --ranks 2\nrank").result == "rank 0: 0\nrank 1: 1"
