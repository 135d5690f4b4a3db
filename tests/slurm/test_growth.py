"""A training that grows over a real Slurm: by one more job, when nodes come free that nobody waits for."""

from __future__ import annotations

import sys
from ast import literal_eval
from pathlib import Path
from textwrap import dedent

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


@pytest.mark.parametrize(("size", "few", "most"), [("--ranks 2:8:2", 4, 8), ("--ranks 4 --nodes 1:2", 2, 4)])
def test_a_run_begins_on_the_node_that_is_free_and_grows_over_the_next(
    bed: SlurmBed, tmp_path: Path, size: str, few: int, most: int
) -> None:
    assert bed.left() == ""
    with notebook(tmp_path) as book:
        book.ok("%load_ext jupyter_distrib")
        with bed.job("--nodes=1", "--exclusive"):
            book.start(counting(f"{size} --grow-after 1"))
            book.until(f"has {few}", 100)
            jobs = bed.jobs()
        book.until(f"{few} to {most} ranks on 2 nodes", 100)
        book.until(f"has {most}", 60)
        (tmp_path / "end").touch()
        ended = book.finish()

        assert ended.result == f"ranks 0-{most - 1}: ({most}, True)", ended.text
        assert len(jobs) >= 2
        if most == 8:
            assert len(bed.jobs()) == 3, "the run's first job, its room there, and the one for what came free"
        book.ok(
            dedent(f"""\
                %%distributed {size} --out where
                import socket
                socket.gethostname()""")
        )
        assert sorted(literal_eval(book.ok("[*where]").result)) == [*["n1"] * (most // 2), *["n2"] * (most // 2)]
    assert bed.left() == ""
