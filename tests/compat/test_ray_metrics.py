"""Ray's own metrics are read and reported; the page is a fake, a real one needs `ray[default]`. `tests/trackers` has MLflow."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator

import pytest

from jupyter_distrib.compat.ray_metrics import RayMetricsMonitor, series
from jupyter_distrib.interfaces import identity
from jupyter_distrib.wire import messages as m
from jupyter_distrib.worker.output import reporting

PAGE = """# HELP ray_node_cpu_utilization Total CPU usage on a ray node
# TYPE ray_node_cpu_utilization gauge
ray_node_cpu_utilization{SessionName="session_1",Version="2.60.0",ip="10.0.0.1"} 12.5
ray_node_disk_io_read{SessionName="s",device="sda"} 3.0
ray_tasks{State="RUNNING",WorkerId="a",Name="f \\"x\\""} 2.0
ray_tasks{State="RUNNING",WorkerId="b",Name="f \\"x\\""} 1.0
ray_something_else 1
ray_node_mem_used nan_is_not_here
"""


@pytest.fixture
def port() -> Iterator[int]:
    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(PAGE.encode())

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def test_only_the_head_tells_of_the_cluster(port: int) -> None:
    node = {
        "system/127.0.0.1/ray_node_n1/node_cpu_utilization": 12.5,
        "system/127.0.0.1/ray_node_n1/node_disk_io_read/sda": 3.0,
    }
    member = RayMetricsMonitor(None, False, "127.0.0.1", "n1", port)
    assert member.collect_metrics() == node
    head = RayMetricsMonitor(None, True, "127.0.0.1", "n1", port)
    assert head.collect_metrics() == {**node, 'system/tasks/f \\"x\\"/RUNNING': 3.0}


def test_samples_are_reported_until_it_is_finished(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[m.Measured | m.Progressed] = []
    came = threading.Event()

    def send(event: m.Measured | m.Progressed) -> None:
        sent.append(event)
        if len(sent) == 2:
            came.set()

    monkeypatch.setattr(identity.cell, "reporter", reporting.Reporter("r-1", 0, send))
    monitor = RayMetricsMonitor(None, False, "127.0.0.1", "n1", port, sampling_interval=0.1)
    monitor.start()
    assert came.wait(10)
    monitor.finish()
    events = [event for event in sent if isinstance(event, m.Measured)]
    assert [event.step for event in events[:2]] == [0, 1]
    assert events[0].values["system/127.0.0.1/ray_node_n1/node_cpu_utilization"] == 12.5
    assert not any(thread.name == "jupyter_distrib-ray-metrics" for thread in threading.enumerate())


def test_lines_that_are_not_series_are_left_out() -> None:
    assert list(series('# a comment\nbroken{\nname 1\nname{a="b"} 2 1234\n')) == [
        ("name", {}, 1.0),
        ("name", {"a": "b"}, 2.0),
    ]


@pytest.mark.parametrize(
    ("port", "why"), [(-1, "it exports none"), (1, r"http://127.0.0.1:1/metrics does not answer \(.*refused")]
)
def test_a_node_that_exports_no_metrics_is_reported_once(port: int, why: str) -> None:
    monitor = RayMetricsMonitor(None, True, "127.0.0.1", "n1", port)
    with pytest.warns(UserWarning, match=f"no metrics of this node of Ray: {why}.*ray\\[default\\] is installed"):
        assert monitor.collect_metrics() == {}
    assert monitor.collect_metrics() == {}
