"""Sampling a detached run: a real kernel and ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.notebook import Notebook

pytestmark = pytest.mark.slow  # samples for five seconds

CELL = """%%distributed --ranks 2 --detach --out job
import time
def slow_step():
    time.sleep(0.05)
while True:
    slow_step()
"""


def test_a_detached_run_is_sampled_and_goes_on(tmp_path: Path) -> None:
    with Notebook(tmp_path) as book:
        book.ok("%load_ext jupyter_distrib")
        assert "no run is in progress" in book.fails("%distributed_flame").evalue
        book.ok(CELL)
        shown = book.ok("%distributed_flame 1")
        assert "samples of rank 1" in shown.result
        assert "slow_step" in shown.result
        assert "data:image/svg+xml" in shown.result_html
        assert "has no rank 7" in book.fails("%distributed_flame 7").evalue
        assert book.ok("job.state").result == "'running'"
        book.ok("job.cancel(force=True)")
