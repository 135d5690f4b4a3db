"""The facts about MLflow: the runs that a cell logs to on a rank.

If the run is tracked (`trackers/mlflow.py`), a cell on every rank finds its MLflow run as the active one, and one rank
writes: `mlflow.log_metric` and its siblings do nothing on the other ranks, unless these have begun runs of their own.
What a cell leaves open is closed before the next cell.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from jupyter_distrib.libraries.library import Library

RUN_VARIABLE = "JUPYTER_DISTRIB_MLFLOW"
"""The variable that holds the id of the tracked run, and the rank that logs to it."""
END_S = 1.0
"""The most seconds to wait for the server when a run is closed that a cell has left open."""


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
            if active is None or active.info.run_id == run:
                return None
        return log(*arguments, **keywords)

    return logged


def _close_runs(fluent: Any) -> None:
    """Close the runs that a cell has left open in the rank's main thread; the kernel ends the tracked one itself."""
    tracked = os.environ.get(RUN_VARIABLE, "").partition(" ")[0]
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
    mend={"mlflow.tracking.fluent": _log_from_one_rank},
    after_cell={"mlflow.tracking.fluent": _close_runs},
)
