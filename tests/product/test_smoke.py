from textwrap import dedent

import pytest

from tests.notebook import Notebook


@pytest.mark.versions
def test_a_cell_runs_on_every_rank(notebook: Notebook) -> None:
    outcome = notebook.cell(
        dedent("""\
            %%distributed --ranks 2
            print('hello from', rank)
            rank * 10""")
    )

    assert outcome.result == "rank 0: 0\nrank 1: 10"
    assert "[1] hello from 1" in outcome.view
