"""The tracker of MLflow: one MLflow run for each run, a child of the one that is active in the notebook.

The kernel writes it. The ranks get its id and the address of the tracking store, so that `mlflow.log_metric` in a cell
adds to it (`libraries/mlflow.py`). `follow` runs in the cell's thread, the rest in the observer's.
"""

from __future__ import annotations

import getpass
import re
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from jupyter_distrib.kernel.record import run_facts
from jupyter_distrib.kernel.record.observer import ObservedRun, Observer
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.libraries.mlflow import RUN_VARIABLE
from jupyter_distrib.system.interrupts import WholeImports
from jupyter_distrib.wire.messages import Ended, RunEvent

SEND_EVERY_S = 1.0
"""The least interval between two messages to the server."""
MOST_METRICS = 1000
"""The most numbers that a server takes in one message."""
MOST_TEXT = 5000
"""The most characters of a tag that every server takes."""
ANSWER_S = 1.0
"""The most seconds to wait for a connection to the server."""
_opened: set[str] = set()
"""The local stores that this kernel has opened."""


def follow(run: ObservedRun) -> MLflowObserver | None:
    """Return an observer if the run is to be tracked, or an MLflow run is active in this thread."""
    parent = _active_run()
    if parent is None and "mlflow" not in run.trackers:
        return None
    with WholeImports():
        import mlflow
    uri = mlflow.get_tracking_uri()
    client = mlflow.MlflowClient(uri)
    if not uri.startswith(("http:", "https:", "databricks")) and uri not in _opened:
        client.search_experiments(max_results=1)  # makes the tables of a new database, which takes seconds
        _opened.add(uri)
    return MLflowObserver(run, client, uri, parent)


def _active_run() -> Any:
    active = getattr(sys.modules.get("mlflow"), "active_run", None)  # missing while another thread imports it
    return active() if active is not None else None


class MLflowObserver(Observer):
    """The writer of one MLflow run."""

    ends_in_background = True

    def __init__(self, run: ObservedRun, client: Any, uri: str, parent: Any) -> None:
        self._run, self._client, self._uri, self._parent = run, client, uri, parent
        self._id = ""
        self._metrics: list[Any] = []
        self._sent_at_s = 0.0
        self._series = run_facts.Series(run)

    def begin(self) -> Mapping[str, str]:
        from mlflow.tracking import fluent

        _check_answers(self._uri)
        experiment = fluent._get_experiment_id() if self._parent is None else self._parent.info.experiment_id  # noqa: SLF001 - has no public form without side effects
        tags = {"mlflow.user": getpass.getuser(), "mlflow.source.type": "NOTEBOOK", "jupyter_distrib.run": self._run.id}
        if self._parent is not None:
            tags["mlflow.parentRunId"] = self._parent.info.run_id
        made = self._client.create_run(
            experiment, start_time=int(self._run.began_at_s * 1000), tags=tags, run_name=self._run.label
        )
        self._id = made.info.run_id
        self._run.note(self._where(experiment))
        return {
            "MLFLOW_TRACKING_URI": self._uri,
            "MLFLOW_EXPERIMENT_ID": experiment,
            "MLFLOW_RUN_ID": self._id,
            RUN_VARIABLE: f"{self._id} {self._run.ranks[0]}",
        }

    def observe(self, event: RunEvent, record: RunRecord) -> None:
        if not self._sent_at_s:
            self._sent_at_s = time.monotonic()
            self._describe()
        self._add(event)
        if isinstance(event, Ended):
            self._send()
            self._end(run_facts.end_state(record))
        elif time.monotonic() - self._sent_at_s > SEND_EVERY_S:
            self._send()

    def _add(self, event: RunEvent) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        self._metrics += [
            Metric(_key(name), value, now_ms, step) for name, (value, step) in self._series.points(event).items()
        ]

    def _send(self) -> None:
        self._sent_at_s = time.monotonic()
        metrics, self._metrics = self._metrics, []
        for first in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self._id, metrics=metrics[first : first + MOST_METRICS])

    def _end(self, state: str) -> None:
        from mlflow.entities import RunStatus

        # The client's own `set_terminated` prints the address of the run once more.
        store = self._client._tracking_client.store  # noqa: SLF001
        store.update_run_info(self._id, RunStatus.from_string(state), int(time.time() * 1000), None)

    def _describe(self) -> None:
        """Add what is not needed before the cell is sent: parameters, source, the state of git."""
        from mlflow.entities import Param, RunTag

        git = run_facts.git_state(".")
        tags = {f"git.{name}": value for name, value in git.items()}
        if git:
            tags["mlflow.source.git.commit"] = git["commit"]
        tags["jupyter_distrib.cell"] = self._run.source.strip("\n")[:MOST_TEXT]
        params = run_facts.parameters(self._run)
        self._client.log_batch(
            self._id,
            params=[Param(_key(name), value[:500]) for name, value in params.items()],
            tags=[RunTag(name, value) for name, value in tags.items()],
        )

    def _where(self, experiment: str) -> str:
        if self._uri.startswith("http"):
            return f"MLflow: {self._uri.rstrip('/')}/#/experiments/{experiment}/runs/{self._id}"
        return f"MLflow: run {self._id} of experiment {experiment} in {self._uri}"


def _check_answers(uri: str) -> None:
    """Raise `ConnectionError` if nothing listens at the address of a server."""
    parts = urlsplit(uri)
    if parts.scheme in ("http", "https"):
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            socket.create_connection((parts.hostname or "", port), ANSWER_S).close()
        except OSError as error:
            raise ConnectionError(f"the server {uri} does not answer ({error})") from None


def _key(name: str) -> str:
    """Return a name with the characters that MLflow allows."""
    return re.sub(r"[^\w\-./ ]", "_", name, flags=re.ASCII)
