"""Set-ups of the notebook on ranks in two pods."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kubernetes.bed import IMAGE, Cluster
from tests.notebook import Notebook
from tests.product import setup_cases
from tests.ray.conftest import write_trusted

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_each_rank_runs_a_set_up_once(cluster: Cluster, tmp_path: Path) -> None:
    lines = [
        'pool = "cluster"',
        "[pools.cluster]",
        'kind = "kubernetes"',
        f'image = "{IMAGE}"',
        "nodes = 2",
        "ranks = 2",
    ]
    write_trusted(tmp_path, "\n".join([*lines, ""]))
    with Notebook(tmp_path) as book:
        book.ok("%load_ext jupyter_distrib")
        setup_cases.check(book, ranks=2)
