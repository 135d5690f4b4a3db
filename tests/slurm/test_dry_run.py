"""`--dry-run first` before Slurm's queue."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.dry_run.trainings import GOOD, LARGE, LIMIT_S, WRONG
from tests.notebook import Notebook
from tests.ray.conftest import write_trusted
from tests.slurm.bed import SlurmBed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_slurm_is_asked_for_a_job_only_if_the_cell_works_and_fits(bed: SlurmBed, tmp_path: Path) -> None:
    assert bed.left() == "", "of another test"
    lines = ['pool = "cluster"', "[pools.cluster]", 'kind = "slurm"', f"python = {sys.executable!r}", 'nodes = "1"']
    write_trusted(tmp_path, "\n".join([*lines, ""]))
    with Notebook(tmp_path) as book:
        book.ok("%load_ext jupyter_distrib")
        head = "%%distributed --strategy ddp --dry-run first"
        for size, source, said in (
            ("--ranks 2 --detach", WRONG, "the dry run says that it fails"),
            ("--gpus 2 --gpu-type T4", LARGE, "the dry run says that it does not fit"),
        ):
            refused = book.cell(f"{head} {size}\n{source}", LIMIT_S)
            assert said in refused.traceback, refused.text
            assert bed.jobs() == []
        outcome = book.cell(f"{head} --ranks 2 --detach --out run\n{GOOD}", LIMIT_S)
        assert outcome.status == "ok", outcome.text
        assert book.cell("run.result()", LIMIT_S).status == "ok"
        assert len(bed.jobs()) == 1
    assert bed.left() == ""
