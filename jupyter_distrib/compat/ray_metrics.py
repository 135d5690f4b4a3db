"""`RayMetricsMonitor`: copies the metrics of Ray's nodes into a tracker. A thread in the process that makes it, which
is a rank of `ray_launch`, or a notebook that has started Ray.

On a rank the metrics are reported as by `jupyter_distrib.report`, so they appear in the live view and every tracker of
the run; with a run id, they are logged to MLflow directly. Standard library, and MLflow if it is used.
"""

from __future__ import annotations

import re
import threading
import time
import urllib.request
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from jupyter_distrib.worker.output import reporting

SAMPLING_S = 10.0
ANSWER_S = 5.0
_LINE = re.compile(r"(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})? +(?P<value>\S+)(?: +\d+)?")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
CLUSTER = re.compile(r"ray_(?:tasks|actors|placement_groups|cluster_\w+|gcs_\w+)")
"""Families of metrics about the whole cluster, which only the head's monitor copies."""
NODE = re.compile(r"ray_(?:node|object_store|raylet)_\w+")
"""Families of metrics about one node."""
_ABOUT_PROCESSES = frozenset({"SessionName", "Version", "WorkerId", "JobId", "NodeId", "NodeAddress", "ip"})
"""Labels that are not part of a series' name."""


class RayMetricsMonitor:
    """Copies the metrics of one node, and on the head also the metrics of the cluster.

    Args:
        run_id: The MLflow run to log to; None for the run of the cell, through `jupyter_distrib.report`.
        is_head_node: Whether the metrics about the whole cluster are copied as well.
        node_ip: The address of the node.
        ray_node_id: The node's id, part of the names of its metrics.
        metrics_export_port: The port on which the node exports its metrics.
        sampling_interval: Seconds between two samples.
    """

    def __init__(  # noqa: PLR0917 - the signature that notebooks have
        self,
        run_id: str | None,
        is_head_node: bool,
        node_ip: str,
        ray_node_id: str,
        metrics_export_port: int,
        sampling_interval: float = SAMPLING_S,
    ) -> None:
        self.run_id, self.is_head_node = run_id, is_head_node
        self._prefix = f"system/{node_ip}/ray_node_{ray_node_id}"
        self._url = f"http://{node_ip}:{metrics_export_port}/metrics"
        self._interval_s = sampling_interval
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._step = 0
        self._has_port = metrics_export_port > 0
        self._has_warned = False

    def start(self) -> None:
        """Copy samples regularly, in a thread, until `finish` or the end of the MLflow run."""
        self._thread = threading.Thread(target=self._run, name="jupyter_distrib-ray-metrics", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Stop copying."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(ANSWER_S)

    def _run(self) -> None:
        while not self._over.wait(self._interval_s) and self._is_wanted():
            self.publish_metrics(self.collect_metrics())

    def collect_metrics(self) -> dict[str, float]:
        """Return a sample of the node's metrics, by name in the tracker; empty if the node does not answer, as one
        warning says."""
        if not self._has_port:
            return self._nothing("it exports none")
        try:
            with urllib.request.urlopen(self._url, timeout=ANSWER_S) as page:  # noqa: S310 - http, see `_url`
                text = page.read().decode("utf-8", "replace")
        except OSError as error:
            return self._nothing(f"{self._url} does not answer ({error})")
        found: dict[str, float] = {}
        for name, labels, value in series(text):
            shown = "/".join([name.removeprefix("ray_"), *(labels[each] for each in sorted(labels) if labels[each])])
            if self.is_head_node and CLUSTER.fullmatch(name):
                key = f"system/{shown}"
            elif NODE.fullmatch(name):
                key = f"{self._prefix}/{shown}"
            else:
                continue
            found[key] = found.get(key, 0.0) + value  # one series for each process
        return found

    def _nothing(self, why: str) -> dict[str, float]:
        if not self._has_warned:
            self._has_warned = True
            text = "There are no metrics of this node of Ray: {}. Ray exports them where ray[default] is installed."
            warnings.warn(text.format(why), stacklevel=3)
        return {}

    def publish_metrics(self, metrics: Mapping[str, float]) -> None:
        """Log a sample to the tracker."""
        step, self._step = self._step, self._step + 1
        if not metrics:
            return
        if self.run_id is None:
            reporting.report(metrics, step=step)
            return
        import mlflow
        from mlflow.entities import Metric

        at_ms = int(time.time() * 1000)
        entries = [Metric(name, value, at_ms, step) for name, value in metrics.items()]
        mlflow.MlflowClient().log_batch(self.run_id, metrics=entries)

    def _is_wanted(self) -> bool:
        if self.run_id is None:
            return True
        import mlflow

        status: Any = mlflow.MlflowClient().get_run(self.run_id).info.status
        return bool(status == "RUNNING")


def series(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield name, labels and value of each series of a page in Prometheus' text format."""
    for line in text.splitlines():
        if match := _LINE.fullmatch(line.strip()):
            labels = dict(_LABEL.findall(match["labels"] or ""))
            kept = {name: value for name, value in labels.items() if name not in _ABOUT_PROCESSES}
            try:
                yield match["name"], kept, float(match["value"])
            except ValueError:
                continue
