"""A training that grows over pods, by one more Job when there is room for its pods, and that goes on with fewer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kubernetes.bed import IMAGE, Cluster
from tests.notebook import Notebook
from tests.product.growth_cells import counting
from tests.ray.conftest import write_trusted

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("size", ["--ranks 2:4:2", "--ranks 4 --nodes 1:2"])
def test_a_run_grows_when_there_is_room_and_goes_on_with_fewer_when_a_pod_is_lost(
    cluster: Cluster, tmp_path: Path, size: str
) -> None:
    write_trusted(tmp_path, f'pool = "cluster"\n[pools.cluster]\nkind = "kubernetes"\nimage = "{IMAGE}"\n')
    end = cluster.folder / f"end-{tmp_path.name}"  # outside /tmp, of which each pod has its own
    cluster.do("quota", "1")
    with Notebook(tmp_path) as book:
        book.ok("%load_ext jupyter_distrib")
        book.start(counting(f"{size} --grow-after 1 --max-restarts 1", f"{end}-checkpoint", str(end)))
        book.until("has 2", 60)
        [first] = cluster.names("pods")
        cluster.do("quota", "2")
        book.until("2 to 4 ranks on 2 nodes", 60)
        book.until("has 4", 60)
        [further] = {*cluster.names("pods")} - {first}
        cluster.do("quota", "1")
        cluster.do("evict", further)
        book.until("goes on with 2 of 4 ", 120)
        end.touch()
        ended = book.finish(60)

        assert ended.result == "ranks 0-1: (2, True)", ended.text
        assert "attempt 2 of 2, since rank 2 was lost" in ended.view or "was evicted" in ended.view, ended.view
        book.ok("%distributed_pool stop cluster")
