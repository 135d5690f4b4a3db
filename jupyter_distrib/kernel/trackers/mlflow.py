"""The tracker of MLflow: one MLflow run for each run, a child of the one that is active in the notebook.

The kernel writes it. The ranks get a tag of it and the address of the tracking store, so that `mlflow.log_metric` in a
cell adds to it (`libraries/mlflow.py`). The cell waits for `follow` and `begin`, which ask no server; the rest runs in
the observer's thread.
"""

from __future__ import annotations

import getpass
import os
import re
import socket
import sys
import time
from collections.abc import Collection, Mapping
from typing import Any
from urllib.parse import urlsplit

from jupyter_distrib.addresses import shown
from jupyter_distrib.kernel.analysis import git_folder, run_facts
from jupyter_distrib.kernel.record.observer import ObservedRun, Observer
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.libraries.mlflow import RUN_TAG, RUN_VARIABLE, active_experiment, find_run, store_of
from jupyter_distrib.system.interrupts import WholeImports
from jupyter_distrib.wire import messages as m

library = "mlflow"
SEND_EVERY_S = 1.0
"""Minimum interval between two messages to the server."""
MOST_METRICS = 1000
"""Maximum number of values in one message to the server."""
MOST_TEXT = 5000
"""Maximum length of a tag that every server accepts."""
SERVERS = ("http:", "https:", "databricks")
ANSWER_S = 1.0
"""Maximum seconds to wait for a connection to the server."""
_opened: set[str] = set()
"""The local stores that this kernel has opened."""


def follow(run: ObservedRun) -> MLflowObserver | None:
    """Return an observer if the run is to be tracked, or if an MLflow run is active in the thread that began or
    submitted it."""
    parent = None if run.attached else run.context["mlflow"] if "mlflow" in run.context else active_run()
    if parent is None and "mlflow" not in run.trackers:
        return None
    with WholeImports():
        import mlflow  # here, since a thread cannot import it any more when the kernel ends with its run
    uri = mlflow.get_tracking_uri()
    if not run.attached and not uri.startswith(SERVERS) and uri not in _opened:
        # Makes the tables of a new database, which takes seconds, before a rank looks for them.
        mlflow.MlflowClient().search_experiments(max_results=1)
        _opened.add(uri)
    return MLflowObserver(run, parent, uri)


def active_run() -> Any:
    """Return the MLflow run that is active in this thread; None without one."""
    active = getattr(sys.modules.get("mlflow"), "active_run", None)  # missing while another thread imports it
    return active() if active is not None else None


class MLflowObserver(Observer):
    """The writer of one MLflow run."""

    ends_in_background = True

    def __init__(self, run: ObservedRun, parent: Any, uri: str) -> None:
        self._run, self._parent, self._uri = run, parent, uri
        self._client: Any = None
        self._id = ""
        self._given: dict[str, str] = {}
        """The variables for the ranks."""
        self._metrics: list[Any] = []
        self._there: Mapping[str, Collection[int]] = {}
        """The steps that an attached run already has, by metric."""
        self._sent_at_s = 0.0
        self._series = run_facts.Series(run)

    def begin(self) -> Mapping[str, str]:
        # Nothing here asks the server, for which the cell would wait. The ranks find the run by its tag.
        names = ("MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME")
        given = self._given = {name: os.environ[name] for name in names if name in os.environ}
        given[RUN_VARIABLE] = f"{self._run.id} {self._run.ranks[0]}"
        given["MLFLOW_TRACKING_URI"] = self._uri
        if self._parent is not None:
            given["MLFLOW_EXPERIMENT_ID"] = self._parent.info.experiment_id
        elif chosen := active_experiment():
            given["MLFLOW_EXPERIMENT_ID"] = chosen
        return given

    def observe(self, event: m.RunEvent, record: RunRecord) -> None:
        if self._client is None:
            self._open()
        if not self._id:
            return
        self._add(event)
        if isinstance(event, m.Ended):
            self._send()
            self._end(run_facts.end_state(record))
        elif time.monotonic() - self._sent_at_s > SEND_EVERY_S:
            self._send()

    def _open(self) -> None:
        """Create the MLflow run, or find that of an attached run if it was left open."""
        import mlflow

        self._client = mlflow.MlflowClient(self._uri)
        _check_answers(self._uri)
        if self._run.attached:
            self._find()
        else:
            self._make()
        self._sent_at_s = time.monotonic()

    def _make(self) -> None:
        experiment = self._experiment()
        tags = {"mlflow.user": getpass.getuser(), "mlflow.source.type": "NOTEBOOK", RUN_TAG: self._run.id}
        if self._parent is not None:
            tags["mlflow.parentRunId"] = self._parent.info.run_id
        made = self._client.create_run(
            experiment, start_time=int(self._run.began_at_s * 1000), tags=tags, run_name=self._run.label
        )
        self._id = made.info.run_id
        self._run.note(self._where(experiment))
        self._describe()

    def _experiment(self) -> str:
        """Return the experiment that was selected when the run began, since MLflow's own function uses the present
        one."""
        from mlflow.exceptions import MlflowException
        from mlflow.tracking.default_experiment.registry import get_experiment_id

        if number := self._given.get("MLFLOW_EXPERIMENT_ID"):
            return number
        if not (name := self._given.get("MLFLOW_EXPERIMENT_NAME")):
            return str(get_experiment_id() or 0)  # 0 is the default experiment
        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name))
            except MlflowException:  # another run has made it meanwhile
                found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id)

    def _find(self) -> None:
        experiments = [each.experiment_id for each in self._client.search_experiments()]
        if (found := find_run(self._client, experiments, self._run.id)) is None:
            raise LookupError(f"there is no run with the tag {RUN_TAG}={self._run.id} in {shown(self._uri)}")
        if found.info.status == "RUNNING":
            self._id = found.info.run_id
            self._there = {
                key: {point.step for point in self._client.get_metric_history(self._id, key)}
                for key in found.data.metrics
            }
            self._run.note(self._where(found.info.experiment_id))

    def _add(self, event: m.RunEvent) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        self._metrics += [
            Metric(key, value, now_ms, step)
            for key, (value, step) in ((_key(name), point) for name, point in self._series.points(event).items())
            if step not in self._there.get(key, ())
        ]

    def _send(self) -> None:
        self._sent_at_s = time.monotonic()
        metrics, self._metrics = self._metrics, []
        for first in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self._id, metrics=metrics[first : first + MOST_METRICS])

    def _end(self, state: str) -> None:
        from mlflow.entities import RunStatus

        # The client's own `set_terminated` prints the address of the run once more.
        store = store_of(self._client)
        store.update_run_info(self._id, RunStatus.from_string(state), int(time.time() * 1000), None)

    def _describe(self) -> None:
        """Add everything that is not needed before the cell is sent: parameters, source, the state of git."""
        from mlflow.entities import Param, RunTag

        git = git_folder.state(".")
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
            return f"MLflow: {shown(self._uri).rstrip('/')}/#/experiments/{experiment}/runs/{self._id}"
        return f"MLflow: run {self._id} of experiment {experiment} in {shown(self._uri)}"


def _check_answers(uri: str) -> None:
    """Raise `ConnectionError` if nothing listens at the address of a server."""
    parts = urlsplit(uri)
    if parts.scheme in ("http", "https"):
        try:
            port = parts.port or (443 if parts.scheme == "https" else 80)
            socket.create_connection((parts.hostname or "", port), ANSWER_S).close()
        except ValueError:  # the message shows a part of the address
            raise ConnectionError(f"the address {shown(uri)} of the server has no valid port") from None
        except OSError as error:
            raise ConnectionError(f"the server {shown(uri)} does not answer ({error})") from None


def _key(name: str) -> str:
    """Return a name with the characters that MLflow allows."""
    return re.sub(r"[^\w\-./ ]", "_", name, flags=re.ASCII)
