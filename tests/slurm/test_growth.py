"""A training that grows over a real Slurm: by one more job, when nodes come free that nobody waits for."""

from __future__ import annotations

import sys
from ast import literal_eval
from pathlib import Path

import pytest

from tests.notebook import Notebook
from tests.product.growth_cells import counting
from tests.ray.conftest import write_trusted
from tests.slurm.bed import SlurmBed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def notebook(folder: Path) -> Notebook:
    lines = ['pool = "cluster"', "[pools.cluster]", 'kind = "slurm"', f"python = {sys.executable!r}"]
    write_trusted(folder, "\n".join([*lines, 'interface = "lo"', ""]))
    return Notebook(folder)


def test_a_run_begins_on_the_node_that_is_free_and_grows_over_the_next(bed: SlurmBed, tmp_path: Path) -> None:
    assert bed.left() == ""
    with notebook(tmp_path) as book:
        book.ok("%load_ext jupyter_distrib")
        with bed.job("--nodes=1", "--exclusive"):
            book.start(counting("--ranks 2:8:2 --grow-after 1"))
            book.until("has 4", 100)
            jobs = bed.jobs()
        book.until("grown from 4 to 8 ranks at step ", 100)
        book.until("has 8", 60)
        (tmp_path / "end").touch()
        ended = book.finish()

        assert ended.result == "ranks 0-7: (8, True)", ended.text
        assert len(jobs) >= 2
        assert len(bed.jobs()) == 3, "the run's first job, its room there, and the one for what came free"
        book.ok("%%distributed --ranks 8 --out where\nimport socket\nsocket.gethostname()")
        assert sorted(literal_eval(book.ok("[*where]").result)) == ["n1"] * 4 + ["n2"] * 4
    assert bed.left() == ""
