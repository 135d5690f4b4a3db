"""The sidebar over a pool of Kubernetes pods: the tests' stand-in for a cluster, with the real kubectl."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import Browser, expect

from tests.kubernetes import bed
from tests.kubernetes.conftest import end_coordinators
from tests.processes import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.browser.lab import Server

WORK = """%%distributed
import socket, time
print('in pod', socket.gethostname(), flush=True)
while True:
    time.sleep(0.05)"""


@pytest.fixture
def cluster_server(browser: Browser, runtime: Path, tmp_path: Path) -> Iterator[tuple[bed.Cluster, Server]]:
    """A cluster, and a server whose kernels reach it."""
    from tests.browser.lab import Server

    if reason := bed.missing():
        pytest.skip(reason)
    cluster = bed.Cluster()
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in cluster.environment.items():
                patch.setenv(name, value)
            server = Server(tmp_path, {"python3": None})
            settings = f'[pools.pods]\nkind = "kubernetes"\nimage = "{bed.IMAGE}"\ngpus_per_pod = 1\n'
            (server.work / "jupyter_distrib.toml").write_text(settings)
            try:
                yield cluster, server
            finally:
                server.end_kernels()
                server.close()
                end_coordinators()
    finally:
        cluster.close()


def test_pods_are_picked_run_stopped_and_given_back(
    browser: Browser, cluster_server: tuple[bed.Cluster, Server]
) -> None:
    from tests.browser.lab import Lab

    cluster, server = cluster_server
    server.notebook("pods.ipynb", ["%load_ext jupyter_distrib", WORK, "%%distributed\nrank"])
    lab = Lab(browser, server, "pods.ipynb", height=1000)
    lab.load_extension()
    panel = lab.panel()
    pool = panel.locator(".jp-Distributed-pool", has_text="pods")
    expect(pool).to_contain_text("Not trusted yet: jupyter_distrib.toml")
    lab.shoot("kubernetes-untrusted")
    pool.get_by_role("button", name="Trust this file").click()
    expect(pool).to_contain_text(f"image {bed.IMAGE}")
    panel.get_by_label("Pool", exact=True).select_option("pods")
    panel.get_by_label("Ranks", exact=True).select_option("ranks")
    expect(panel.locator("code")).to_have_text("%%distributed --ranks 2 --pool pods")
    assert cluster.names("pods") == []  # looking and choosing start nothing
    lab.shoot("kubernetes-picked")

    lab.run(1)
    expect(lab.output(1)).to_contain_text("in pod")
    run = panel.locator(".jp-Distributed-run").first
    expect(run).to_contain_text("running")
    expect(pool).to_contain_text("2 CPU ranks")
    expect(pool).to_contain_text("n0 · 16 CPU cores")
    expect(pool).to_contain_text("Next rank: with a new Job")
    pool.locator("summary").first.click()
    (pod,) = cluster.names("pods")
    for rank in range(2):
        expect(pool.locator("tr", has_text=f"rank {rank}")).to_contain_text(pod)
    lab.shoot("kubernetes-running")
    run.get_by_role("button", name="Stop").click()
    expect(run).to_contain_text("interrupted")
    lab.wait_idle(1)
    expect(pool).to_contain_text("2 CPU ranks, idle")
    lab.shoot("kubernetes-stopped")
    pool.get_by_role("button", name="Stop ranks").click()
    expect(pool).to_contain_text("No ranks are up")
    lab.dark()
    lab.shoot("kubernetes-released-dark")
    assert wait_until(cluster.is_empty, 60), cluster.names("pods")
    assert lab.errors == []
    lab.close()
