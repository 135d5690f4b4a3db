"""Set-ups of the notebook on ranks of two nodes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.notebook import Notebook
from tests.product import setup_cases
from tests.ray.conftest import write_trusted
from tests.slurm.bed import SlurmBed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_each_rank_runs_a_set_up_once(bed: SlurmBed, tmp_path: Path) -> None:
    lines = ['pool = "cluster"', "[pools.cluster]", 'kind = "slurm"', "nodes = 2", "ranks = 2", 'interface = "lo"']
    write_trusted(tmp_path, "\n".join([*lines, f"python = {sys.executable!r}", ""]))
    with Notebook(tmp_path) as book:
        book.ok("%load_ext jupyter_distrib")
        setup_cases.check(book, ranks=2)
