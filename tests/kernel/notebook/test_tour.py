"""`%distributed_tour`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jupyter_distrib.errors import OptionsError
from jupyter_distrib.kernel.notebook import tour
from tests.notebook import Notebook

nbformat = pytest.importorskip("nbformat")


def test_the_notebook_is_a_valid_one_of_five_cells(tmp_path: Path) -> None:
    path = tour.write(tmp_path)
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert sum(cell.cell_type == "code" for cell in notebook.cells) == 5


def test_a_notebook_that_is_there_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / tour.FILE).write_text("mine")
    with pytest.raises(OptionsError, match="is there already"):
        tour.write(tmp_path)
    assert (tmp_path / tour.FILE).read_text() == "mine"


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(OptionsError, match=r"cannot be written: No such file or directory\."):
        tour.write(tmp_path / "gone")


@pytest.mark.slow
def test_its_cells_run_and_the_model_is_trained(tmp_path: Path) -> None:
    with Notebook(tmp_path) as book:
        book.ok("%load_ext jupyter_distrib")
        assert tour.FILE in book.ok("%distributed_tour").stdout
        assert book.fails("%distributed_tour here").ename == "OptionsError"
        cells = json.loads((tmp_path / tour.FILE).read_text())["cells"]
        outcomes = [book.ok(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        assert "3.0" in outcomes[1].result
        assert float(outcomes[-1].stdout.removeprefix("tensor(").removesuffix(")\n")) < 1.0
