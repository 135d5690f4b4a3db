"""The facts about MLflow: the runs that a cell logs to on a rank.

If the run is tracked (`kernel/trackers/mlflow.py`), a cell on every rank finds its MLflow run as the active one, and
one rank writes: `mlflow.log_metric` and its siblings do nothing on the other ranks, unless these have begun runs of
their own. Runs that a cell leaves open are closed before the next cell.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from jupyter_distrib.libraries.library import Library

RUN_VARIABLE = "JUPYTER_DISTRIB_MLFLOW"
"""Environment variable with the id of the tracked run, and the rank that logs to it."""
RUN_TAG = "jupyter_distrib.run"
"""Tag of an MLflow run with the id of the run that it tracks."""
FIND_S = 10.0
"""Most seconds that the first logging call on a rank waits for the kernel to create the MLflow run."""
FIND_EVERY_S = 0.05
END_S = 1.0
"""Most seconds to wait for the server when closing a run that a cell has left open."""


_found: dict[str, str] = {}
"""MLflow runs of the tracked runs on this rank, by run id."""


def find_run(client: Any, experiments: list[str], run: str) -> Any:
    """Return the MLflow run that tracks a run; None if there is none in these experiments."""
    found = client.search_runs(experiments, filter_string=f"tags.`{RUN_TAG}` = '{run}'", max_results=1)
    return found[0] if found else None


def store_of(client: Any) -> Any:
    """Return the store behind a client, which prints nothing."""
    return client._tracking_client.store  # noqa: SLF001 - mlflow has no other way


def active_experiment() -> str | None:
    """Return the id of the experiment that `mlflow.set_experiment` has selected in this process."""
    chosen: str | None = getattr(sys.modules.get("mlflow.tracking.fluent"), "_active_experiment_id", None)
    return chosen


def _tracked(fluent: Any) -> str | None:
    """Return the MLflow run of the running cell, waiting until the kernel has created it."""
    run = os.environ.get(RUN_VARIABLE, "").partition(" ")[0]
    until_s = time.monotonic() + FIND_S
    while run and run not in _found and time.monotonic() < until_s:
        client = fluent.MlflowClient()
        if (made := find_run(client, _experiments(client), run)) is not None:
            _found[run] = made.info.run_id
        else:
            time.sleep(FIND_EVERY_S)
    return _found.get(run)


def _experiments(client: Any) -> list[str]:
    number, name = os.environ.get("MLFLOW_EXPERIMENT_ID"), os.environ.get("MLFLOW_EXPERIMENT_NAME")
    if number or not name:
        return [number or "0"]
    experiment = client.get_experiment_by_name(name)
    return [] if experiment is None else [experiment.experiment_id]


def _mended(module: ModuleType) -> None:
    _log_from_one_rank(module)
    fluent: Any = module
    fluent.start_run = _in_tracked_run(fluent, fluent.start_run)


def _in_tracked_run(fluent: Any, start_run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(start_run)
    def started(run_id: str | None = None, *arguments: Any, **keywords: Any) -> Any:
        if run_id is None and not fluent._active_run_stack.get() and "MLFLOW_RUN_ID" not in os.environ:  # noqa: SLF001
            run_id = _tracked(fluent)
        return start_run(run_id, *arguments, **keywords)

    return started


def _log_from_one_rank(module: ModuleType) -> None:
    """Replace the functions of `mlflow.tracking.fluent` that log to the active run."""
    for name, function in list(vars(module).items()):
        if inspect.isfunction(function) and (name.startswith("log_") or name in ("set_tag", "set_tags", "delete_tag")):
            setattr(module, name, _from_one_rank(module, function))


def _from_one_rank(fluent: Any, log: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(log)
    def logged(*arguments: Any, **keywords: Any) -> Any:
        run, _, rank = os.environ.get(RUN_VARIABLE, "").partition(" ")
        if run and os.environ.get("RANK") != rank:
            active = fluent.active_run()
            if active is None or active.info.run_id == _found.get(run):
                return None
        return log(*arguments, **keywords)

    return logged


def _close_runs(fluent: Any) -> None:
    """Close the runs that a cell has left open in the rank's main thread; the kernel ends the tracked one itself."""
    tracked = _found.pop(os.environ.get(RUN_VARIABLE, "").partition(" ")[0], None)
    stack = fluent._active_run_stack.get()  # noqa: SLF001 - `end_run` waits for the server
    ids = [run.info.run_id for run in stack]
    stack.clear()
    if not ids:
        return

    def end() -> None:
        for run in reversed(ids):
            if (monitor := fluent.run_id_to_system_metrics_monitor.pop(run, None)) is not None:
                monitor.finish()
            if run != tracked:
                fluent.MlflowClient().set_terminated(run)

    closing = threading.Thread(target=end, name="jupyter_distrib-mlflow", daemon=True)
    closing.start()
    closing.join(END_S)


MLFLOW = Library(
    modules=("mlflow",),
    extra="mlflow",
    mend={"mlflow.tracking.fluent": _mended},
    after_cell={"mlflow.tracking.fluent": _close_runs},
)
