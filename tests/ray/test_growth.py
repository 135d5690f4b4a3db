"""A training that grows over a real Ray cluster: by one more placement group, when room comes free that nobody waits
for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.notebook import Notebook
from tests.product.growth_cells import counting
from tests.ray.conftest import CPUS, Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.mark.parametrize("size", ["--ranks 2:8:2", "--ranks 4 --nodes 1:2"])
def test_a_run_begins_with_what_is_free_and_grows(cluster: Cluster, tmp_path: Path, size: str) -> None:
    at = f"--pool ray --insecure --address {cluster.address}"
    with Notebook(tmp_path) as book, Notebook(tmp_path) as other:
        for each in (book, other):
            each.ok("%load_ext jupyter_distrib")
        assert other.cell(f"%%distributed {at} --ranks {CPUS} --nodes 1\nrank;", timeout_s=150).status == "ok"
        book.start(counting(f"{at} {size} --grow-after 1"))
        book.until("has ", 150)
        other.ok("%distributed_pool stop ray")
        book.until("grown from ", 100)
        most = 8 if "2:8" in size else 4
        book.until(f"has {most}", 100)
        (tmp_path / "end").touch()
        ended = book.finish(60)

        assert ended.result == f"ranks 0-{most - 1}: ({most}, True)", ended.text
        status = book.ok("%distributed_status").result
        assert re.search(r"^127\.0\.0\.2 +4, (2|0) free.*\n127\.0\.0\.3 +4, \1 free", status, re.MULTILINE), status
        book.ok("%distributed_pool stop ray")
