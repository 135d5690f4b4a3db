"""`--dry-run first` before the queue of a Kubernetes cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dry_run.trainings import GOOD, LARGE, LIMIT_S, WRONG
from tests.kubernetes.bed import IMAGE, Cluster
from tests.notebook import Notebook
from tests.ray.conftest import write_trusted

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_job_is_made_only_if_the_cell_works_and_fits(cluster: Cluster, tmp_path: Path) -> None:
    write_trusted(tmp_path, f'pool = "cluster"\n[pools.cluster]\nkind = "kubernetes"\nimage = "{IMAGE}"\ncpu = "8"\n')
    with Notebook(tmp_path) as book:
        book.ok("%load_ext jupyter_distrib")
        head = "%%distributed --strategy ddp --dry-run first"
        for size, source, said in (
            ("--ranks 2 --detach", WRONG, "the dry run says that it fails"),
            ("--gpus 2 --gpu-type T4", LARGE, "the dry run says that it does not fit"),
        ):
            refused = book.cell(f"{head} {size}\n{source}", LIMIT_S)
            assert said in refused.traceback, refused.text
            assert cluster.get("jobs") == []
        outcome = book.cell(f"{head} --ranks 2 --detach --out run\n{GOOD}", LIMIT_S)
        assert outcome.status == "ok", outcome.text
        assert len(cluster.get("jobs")) == 1
        assert book.cell("run.result()", LIMIT_S).status == "ok"
