"""`RayMetricsMonitor` on a cluster of `ray_launch`, with what `ray[default]` installs: the metrics of a real node arrive."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from textwrap import dedent

import pytest

from tests.notebook import Notebook
from tests.ray.conftest import ENVIRONMENT

MISSING = [name for name in ("opencensus", "prometheus_client", "aiohttp_cors") if not importlib.util.find_spec(name)]
MONITORS = """
@ray_launch(gpus=2)
def watched():
    import ray, time, warnings
    from serverless_gpu.ray import RayMetricsMonitor
    node = ray.nodes()[0]
    monitor = RayMetricsMonitor(
        run_id=None, is_head_node=True, node_ip=node["NodeManagerAddress"], ray_node_id=node["NodeID"],
        metrics_export_port=node["MetricsExportPort"], sampling_interval=0.5,
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        until_s = time.monotonic() + 90
        while not (found := monitor.collect_metrics()) and time.monotonic() < until_s and WAITS:
            time.sleep(0.5)
        monitor.publish_metrics(found)
    return node["MetricsExportPort"], sorted({name.split("/")[-1 if "node_" not in name else 3] for name in found}), [str(w.message) for w in told]
port, names, told = watched.distributed()
"""


@pytest.fixture
def book(tmp_path: Path) -> Notebook:
    return Notebook(tmp_path, {"RAY_raylet_start_wait_time_s": ENVIRONMENT["RAY_raylet_start_wait_time_s"]})


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(bool(MISSING), reason=f"needs ray[default]: {', '.join(MISSING)} is not installed")
def test_the_metrics_of_a_real_node_are_reported(book: Notebook) -> None:
    with book:
        book.ok(
            dedent("""\
                %load_ext jupyter_distrib
                %distributed_compat databricks
                from serverless_gpu.ray import ray_launch""")
        )
        outcome = book.cell(MONITORS.replace("WAITS", "True"), 280)
        assert outcome.status == "ok", outcome.text
        assert book.ok("port > 0, 'node_cpu_utilization' in names or names").result == "(True, True)"
        rows = "import jupyter_distrib\n[name for row in jupyter_distrib.runs()[-1].metrics for name in row]"
        metrics = book.ok(rows).result
        assert "system/" in metrics


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not MISSING, reason="ray[default] is installed")
def test_a_cluster_without_ray_default_says_what_to_install(book: Notebook) -> None:
    with book:
        book.ok(
            dedent("""\
                %load_ext jupyter_distrib
                %distributed_compat databricks
                from serverless_gpu.ray import ray_launch""")
        )
        outcome = book.cell(MONITORS.replace("WAITS", "False"), 280)
        assert outcome.status == "ok", outcome.text
        (told,) = eval(book.ok("told").result)
        assert "no metrics" in told
        assert "ray[default]" in told
