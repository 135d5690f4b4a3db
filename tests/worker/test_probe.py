"""Where a rank is, told by the frames of its main thread."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from jupyter_distrib.worker.debugging import probe

CELL = "Cell In[1]"


def where(source: str, names: dict[str, object]) -> str:
    """What is told of a cell that calls `look` somewhere."""
    told = []

    def look() -> None:
        told.append(probe._function(list(probe._frames(sys._getframe(1))), CELL, ()))

    exec(compile(source, CELL, "exec"), {"look": look, **names})
    return told[0]


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("look()", ""),
        ("def train():\n    look()\ntrain()", "train()"),
        ("import functools\nfunctools.reduce(lambda a, b: look(), [1, 2])", "<lambda>()"),
    ],
)
@pytest.mark.versions
def test_the_cells_own_function_is_named(source: str, told: str) -> None:
    assert where(source, {}) == told


def test_the_line_of_a_script_that_a_cell_runs_is_reported(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        dedent("""\
        def main():
            look()


        if __name__ == '__main__':
            main()
    """)
    )
    names = {"runpy": runpy, "script": str(script)}

    told = where("runpy.run_path(script, {'look': look}, run_name='__main__')", names)

    assert told == "train.py, line 6"
