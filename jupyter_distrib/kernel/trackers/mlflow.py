"""The tracker of MLflow: one MLflow run for each run, a child of the one that is active in the notebook.

The kernel makes it and writes what it knows of the run. The ranks get its id and the address of the store, so that
`mlflow.log_metric` in a cell adds to it (`libraries/mlflow_rank.py`). It is made in a thread: a cell whose code uses
MLflow waits for it, within limits, and no other cell does. The rest runs in the observer's thread.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from jupyter_distrib.addresses import shown, without_secrets
from jupyter_distrib.kernel.analysis import run_facts
from jupyter_distrib.kernel.record.observer import ObservedRun, Observer
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.libraries.mlflow import active_experiment, is_autologging
from jupyter_distrib.libraries.mlflow_store import (
    DEFAULT_EXPERIMENT,
    RUN_TAG,
    RUN_VARIABLE,
    MLflowUse,
    Tracked,
    anywhere,
    check_file,
    experiment_id,
    find_run,
    make_run,
    moved_to,
    reason,
    resume,
    store_of,
    unlogged,
    user,
)
from jupyter_distrib.system import git_folder, interrupts
from jupyter_distrib.system.data_class import data_class
from jupyter_distrib.wire import messages as m

library = "mlflow"
SEND_EVERY_S = 1.0
"""Minimum interval between two messages to the server."""
MOST_METRICS = 1000
"""Maximum number of values in one message to the server."""
MOST_WAITING = 100_000
"""Maximum number of values that wait for a server that does not accept them."""
MOST_TEXT = 5000
"""Maximum length of a tag that every server accepts."""
SERVERS = ("http:", "https:", "databricks")
ANSWER_S = 1.0
"""Maximum seconds to wait for a connection to the server."""
MADE_S = 5.0
"""Maximum seconds that a cell which uses MLflow waits until a server has made its run; a rank that needs it waits
on."""
TABLES_S = 60.0
"""Maximum seconds that a cell waits for a local store, which may have to make its tables first."""
RETRIES = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3"}
"""The number of times that a rank asks a server again: with MLflow's own number a cell would hang for minutes."""
_opened: set[str] = set()
"""The local stores that this kernel has opened."""
_EXPERIMENT = ("MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME")


@data_class
class Here:
    """The choices that MLflow keeps for a thread."""

    parent: Any
    """The active run; None without one."""
    uri: str
    experiment: str
    """The id of the selected experiment; empty without one."""
    resumed: str
    """The id of the run to continue."""


def follow(run: ObservedRun) -> MLflowObserver | None:
    """Return an observer if the run is to be tracked: its code uses MLflow, `--track` names it, or MLflow autologs or
    has an active run in the thread that began or submitted it."""
    here = run.context.get("mlflow")
    here = here if isinstance(here, Here) else active_run()
    use = run.uses.get("mlflow")
    asked = "mlflow" in run.trackers or "mlflow" in run.uses
    if not asked and (run.attached or here is None or (here.parent is None and not is_autologging())):
        return None
    with interrupts.WholeImports():
        import mlflow  # noqa: F401 - here, since a thread cannot import it any more when the kernel ends with its run
    here = here or active_run()
    assert here is not None
    observer = MLflowObserver(run, here, use if isinstance(use, MLflowUse) else MLflowUse())
    if not run.attached:
        observer.make(waits=use is not None or is_autologging())
    return observer


def active_run() -> Here | None:
    """Return what MLflow has selected in this thread; None if it is not loaded."""
    mlflow = sys.modules.get("mlflow")
    ask = getattr(mlflow, "active_run", None)  # missing while another thread imports it
    if mlflow is None or ask is None:
        return None
    uri, resumed = mlflow.get_tracking_uri(), os.environ.get("MLFLOW_RUN_ID", "")
    return Here(parent=ask(), uri=uri, experiment=active_experiment() or "", resumed=resumed)


def unrecorded(run: ObservedRun) -> Mapping[str, str]:
    """Return the variables by which the ranks of a run that no observer follows leave the store alone."""
    tracked = _away(Tracked(run=run.id, rank=run.ranks[0], uri=""))
    return {RUN_VARIABLE: tracked.text(), "MLFLOW_RUN_ID": tracked.id}


def _away(tracked: Tracked) -> Tracked:
    return replace(tracked, away=True, id=uuid.uuid4().hex)


class MLflowObserver(Observer):
    """The writer of one MLflow run."""

    ends_in_background = True

    def __init__(self, run: ObservedRun, here: Here, use: MLflowUse) -> None:
        self._run, self._here, self._use = run, here, use
        self._uri = use.uri or here.uri
        self._client: Any = None
        self._id = ""
        self._variables = {name: os.environ[name] for name in _EXPERIMENT if name in os.environ}
        """The experiment that the environment named when the run began."""
        self._tracked = Tracked(run=run.id, rank=run.ranks[0], uri=anywhere(self._uri), name=run.label)
        self._metrics: list[Any] = []
        self._sent: list[Any] = []
        """Values that may have to be sent again to the run that replaces this one."""
        self._there: Mapping[str, Collection[int]] = {}
        """The steps that an attached run already has, by metric."""
        self._sent_at_s = 0.0
        self._is_open = self._is_refused = False
        self._series = run_facts.Series(run)
        self._making = threading.Thread(target=self._make_or_say, name="jupyter_distrib-mlflow-run", daemon=True)
        self._made = threading.Event()

    def make(self, *, waits: bool) -> None:
        """Begin to make the MLflow run. Wait for it if the cell needs it, and for the tables of a new local store, for
        which ranks would race."""
        self._making.start()
        is_local = not self._uri.startswith(SERVERS)
        if waits or (is_local and self._uri not in _opened):
            interrupts.wait(self._made, TABLES_S if is_local else MADE_S)

    def begin(self) -> Mapping[str, str]:
        # Nothing here asks the server, for which the cell would wait.
        given = dict(self._variables)
        tracked = self._tracked
        if tracked.away:
            given["MLFLOW_RUN_ID"] = tracked.id
        elif tracked.id:
            given |= {"MLFLOW_RUN_ID": tracked.id, "MLFLOW_EXPERIMENT_ID": tracked.experiment}
            given["MLFLOW_EXPERIMENT_NAME"] = tracked.experiment_name
        elif self._chosen:
            given = {"MLFLOW_EXPERIMENT_ID": self._chosen}
        given.setdefault("MLFLOW_RUN_ID", "")  # the rank that finds the experiment sets it
        given = {**{name: os.environ.get(name, value) for name, value in RETRIES.items()}, **given}
        return {**given, RUN_VARIABLE: tracked.text(), "MLFLOW_TRACKING_URI": tracked.uri}

    @property
    def _chosen(self) -> str:
        """The id of the experiment that the cell or the notebook has chosen; empty if only the environment names
        one."""
        if self._use.experiment_id or self._use.experiment:
            return self._use.experiment_id
        return self._here.parent.info.experiment_id if self._here.parent is not None else self._here.experiment

    def observe(self, event: m.RunEvent, record: RunRecord) -> None:
        with unlogged():
            if not self._is_open:
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
        """Wait until the MLflow run is made, or find that of an attached run if it was left open."""
        import mlflow

        self._is_open = True
        if self._run.attached:
            self._client = mlflow.MlflowClient(self._uri)
            _check_answers(self._uri)
            self._find()
        else:
            self._making.join()
            if self._id:
                self._takes(self._describe)
        self._sent_at_s = time.monotonic()

    def _make_or_say(self) -> None:
        """Make the MLflow run; if that fails, say why. In a thread of its own."""
        import mlflow

        try:
            _check_answers(self._uri)
            check_file(self._uri)
            with unlogged():
                client = mlflow.MlflowClient(self._uri)
                if not self._uri.startswith(SERVERS):
                    client.search_experiments(max_results=1)
                    _opened.add(self._uri)
                self._make(client)
        except Exception as error:  # noqa: BLE001 - of any store
            self._tracked = _away(self._tracked)
            self._run.note(
                f"MLflow: nothing is recorded, since {without_secrets(reason(error))}. The run is not affected."
            )
        finally:
            self._made.set()

    def _make(self, client: Any) -> None:
        made = self._resumed(client)
        if made is None:
            tags = {"mlflow.user": user(), "mlflow.source.type": "NOTEBOOK", RUN_TAG: self._run.id}
            tags["mlflow.source.name"] = self._run.label
            if self._here.parent is not None:
                tags["mlflow.parentRunId"] = self._here.parent.info.run_id
            made = make_run(client, self._experiment(client), self._run.label, self._run.began_at_s, tags)
        number = made.info.experiment_id
        self._tracked = replace(
            self._tracked,
            id=made.info.run_id,
            experiment=number,
            experiment_name=client.get_experiment(number).name,
            artifacts=made.info.artifact_uri or "",
            name=made.info.run_name or self._run.label,
        )
        self._client, self._id = client, made.info.run_id
        self._run.note(self._where(number))

    def _resumed(self, client: Any) -> Any:
        """Return the run that the notebook has named in `MLFLOW_RUN_ID`; None if it has named none that exists."""
        if not (run_id := self._here.resumed):
            return None
        try:
            found = resume(client, run_id)
            client.set_tag(run_id, RUN_TAG, self._run.id)
        except Exception as error:  # noqa: BLE001 - of any store
            why = without_secrets(reason(error))
            self._run.note(
                f"MLflow: the run {run_id} of MLFLOW_RUN_ID is not continued, since {why}: this is a new one."
            )
            return None
        return found

    def _experiment(self, client: Any) -> str:
        """Return the experiment that was selected when the run began, since MLflow's own function uses the present
        one."""
        from mlflow.tracking.default_experiment.registry import get_experiment_id

        if self._use.experiment:
            return experiment_id(client, self._use.experiment)
        if number := self._chosen or self._variables.get("MLFLOW_EXPERIMENT_ID"):
            return number
        if name := self._variables.get("MLFLOW_EXPERIMENT_NAME"):
            return experiment_id(client, name)
        return str(get_experiment_id() or DEFAULT_EXPERIMENT)

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
        if self._takes(lambda: self._log(metrics)):
            self._sent += metrics
            del self._sent[:-MOST_WAITING]
        else:
            self._metrics = metrics[-MOST_WAITING:]

    def _takes(self, send: Callable[[], object]) -> bool:
        """Send something to the store, or to where the cell has moved its run; return whether it was accepted."""
        try:
            try:
                send()
            except Exception:
                if not self._is_moved():
                    raise
                send()
        except Exception as error:  # noqa: BLE001 - of any store
            if not self._is_refused:
                self._is_refused = True
                why = without_secrets(reason(error))
                self._run.note(
                    f"MLflow: the store does not accept what the kernel sends ({why}); it will be tried again."
                )
            return False
        return True

    def _log(self, metrics: list[Any]) -> None:
        for first in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self._id, metrics=metrics[first : first + MOST_METRICS])

    def _is_moved(self) -> bool:
        """Return whether the cell has moved its run to another experiment or store, and continue the new one."""
        import mlflow

        try:
            moved = moved_to(self._client, self._id)
            if moved is None:
                return False
            self._id, self._uri = moved
            self._client = mlflow.MlflowClient(self._uri)
            self._run.note(self._where(self._client.get_run(self._id).info.experiment_id))
            self._describe()
            self._log(self._sent)
        except Exception:  # noqa: BLE001 - of any store
            return False
        return True

    def _end(self, state: str) -> None:
        from mlflow.entities import RunStatus

        self._is_moved()
        try:
            # The client's own `set_terminated` prints the address of the run once more.
            store = store_of(self._client)
            store.update_run_info(self._id, RunStatus.from_string(state), int(time.time() * 1000), None)
        except Exception as error:  # noqa: BLE001 - of any store
            self._run.note(f"MLflow: the end of the run is not recorded, since {without_secrets(reason(error))}.")

    def _describe(self) -> None:
        """Add everything that is not needed before the cell is sent: parameters, source, the state of git."""
        from mlflow.entities import Param, RunTag
        from mlflow.exceptions import MlflowException

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
        with suppress(MlflowException):  # the cell has logged one of them already, with another value
            given = run_facts.arguments(self._run)
            self._client.log_batch(self._id, params=[Param(_key(name), value[:500]) for name, value in given.items()])

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
