"""What ends a Spark application of ours: the end of its last ranks, and that of their kernel."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.notebook import Notebook
from tests.spark.conftest import StandaloneCluster, wait_until_none

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

OURS = ("jupyter_distrib.pools.spark", "ray/raylet", "ray/gcs", "spark.deploy.SparkSubmit", "CoarseGrainedExecutor")
"""Words in the command lines of what an application consists of."""


def test_stop_ends_the_application(cells: Notebook) -> None:
    assert cells.cell("%%distributed\nrank;", 300).status == "ok"
    cells.ok("%distributed_pool stop")
    assert wait_until_none(OURS, 120) == []  # the record of a detached run may have to end first


def test_a_standalone_master_and_the_end_of_the_kernel(standalone: StandaloneCluster, tmp_path: Path) -> None:
    with Notebook(tmp_path) as book:
        book.ok("%load_ext jupyter_distrib")
        line = f"--pool spark --master {standalone.url} --executors 2 --ranks 2 --nodes 2"
        outcome = book.cell(f"%%distributed {line}\nimport os\nint(os.environ['NODE_RANK'])", 300)
        assert outcome.result == "rank 0: 0\nrank 1: 1", outcome.text
        os.kill(book.pid, signal.SIGKILL)
        assert wait_until_none(OURS) == []
