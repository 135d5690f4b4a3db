"""The contract suite on pods: what every pool does, by real kubectl."""

from __future__ import annotations

import os
from collections.abc import Callable
from textwrap import dedent

import pytest

from jupyter_distrib import testing
from jupyter_distrib.pools.kubernetes.pool import KubernetesPool
from jupyter_distrib.wire import messages as m
from tests.kubernetes.bed import Cluster
from tests.kubernetes.conftest import Open, pool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

ON_TWO_NODES = ("sends_output_in_order", "moves_big_values", "keeps_and_forgets", "stops", "tells_exceptions")
NEEDS_A_SHARED_TMP = "attaches"
"""The flag that its ranks wait for is in /tmp, and each pod has its own; see the test below."""


@pytest.fixture(scope="module")
def opened(running_cluster: Cluster) -> Callable[[str], Callable[[], KubernetesPool]]:
    return lambda check: lambda: pool(**({"nodes": "2"} if check in ON_TWO_NODES else {}))


@pytest.mark.parametrize(
    "check",
    [check for check in testing.checks(detached=True) if check.__name__ != NEEDS_A_SHARED_TMP],
    ids=lambda check: check.__name__,
)
def test_contract(check: testing.Check, opened: Callable[[str], Callable[[], KubernetesPool]]) -> None:
    check(opened(check.__name__))


def test_a_detached_run_holds_its_pods_and_only_that_long(cluster: Cluster, client: Open) -> None:
    flag = cluster.folder / "flag"
    source = dedent("""\
        import os, time
        print('first', rank)
        while not os.path.exists(flag):
            time.sleep(0.01)
        rank * 10""")
    one = client(idle="5")
    run = one.start(one.group(2), source, inputs={"flag": str(flag)}, detached=True, label="train")
    one.wait(m.Wrote)
    one.close()
    other = client(idle="5")
    other.send(m.Attach(run=run))
    assert other.wait(m.Attached).label == "train"
    assert len(cluster.get("jobs")) == 1
    os.close(os.open(flag, os.O_CREAT | os.O_EXCL, 0o600))
    assert other.finish(run, (0, 1)).values == {0: 0, 1: 10}
