"""The contract suite over a Ray cluster of two nodes; some of it through Ray Client."""

from __future__ import annotations

import pytest

from jupyter_distrib import testing
from jupyter_distrib.pools.ray.pool import RayPool
from jupyter_distrib.testing import pool_client
from tests.ray.conftest import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ON_ONE_NODE = ("gives_values_in_rank_order", "sets_torchruns_variables", "numbers_ranks_from_the_first")
"""What these say of local ranks is so if all ranks are on one node."""
THROUGH_CLIENT = ("gives_values_in_rank_order", "moves_big_values", "stops", "writes_logs")


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray may take a minute to join and to start processes where others want the processor too."""
    monkeypatch.setattr(pool_client, "LIMIT_S", 240.0)


@pytest.mark.parametrize("check", testing.checks(detached=True), ids=lambda check: check.__name__)
def test_two_nodes(check: testing.Check, cluster: Cluster) -> None:
    nodes = "1" if check.__name__ in ON_ONE_NODE else "2"
    check(lambda: RayPool(address=cluster.address, insecure="", nodes=nodes))


@pytest.mark.parametrize(
    "check",
    [check for check in testing.checks(detached=True) if check.__name__ in THROUGH_CLIENT],
    ids=lambda check: check.__name__,
)
def test_ray_client(check: testing.Check, cluster: Cluster) -> None:
    nodes = "1" if check.__name__ in ON_ONE_NODE else "2"
    check(lambda: RayPool(address=cluster.client_address, insecure="", nodes=nodes))
