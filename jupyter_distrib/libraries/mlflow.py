"""The facts about MLflow: its state in a rank's process is restored after each cell, and the notebook's choice of
store and experiment is sent along. The run of a tracked cell: `mlflow_rank.py`."""

from __future__ import annotations

import os
import sys
import threading
from types import ModuleType
from typing import Any

from jupyter_distrib.libraries import mlflow_rank
from jupyter_distrib.libraries.library import Library

END_S = 1.0
"""Maximum seconds to wait for the server when closing a run that a cell has left open."""
_FLUENT = "mlflow.tracking.fluent"
_STORE = "mlflow.tracking._tracking_service.utils"
_REGISTRY = "mlflow.tracking._model_registry.utils"
_AUTOLOGGING = "mlflow.utils.autologging_utils"


def active_experiment() -> str | None:
    """Return the id of the experiment that `mlflow.set_experiment` has selected in this process."""
    chosen: str | None = getattr(sys.modules.get(_FLUENT), "_active_experiment_id", None)
    return chosen


def chosen() -> dict[str, str | None]:
    """Return the variables by which ranks find the store and the experiment that the notebook has chosen; None for one
    that they must not have."""
    if _FLUENT not in sys.modules:
        return {}
    found = {
        "MLFLOW_TRACKING_URI": getattr(sys.modules.get(_STORE), "_tracking_uri", None),
        "MLFLOW_REGISTRY_URI": getattr(sys.modules.get(_REGISTRY), "_registry_uri", None),
        "MLFLOW_EXPERIMENT_ID": active_experiment(),
    }
    given: dict[str, str | None] = {name: str(value) for name, value in found.items() if value}
    if found["MLFLOW_EXPERIMENT_ID"]:
        given["MLFLOW_EXPERIMENT_NAME"] = None  # MLflow refuses an id and a name that contradict each other
    return given


def is_autologging() -> bool:
    """Return whether autologging is on in this process."""
    known = getattr(sys.modules.get(_AUTOLOGGING), "AUTOLOGGING_INTEGRATIONS", {})
    return any(settings and not settings.get("disable") for settings in list(known.values()))


def _after_cell(fluent: Any) -> None:
    _close_runs(fluent)
    _put_back(fluent)
    mlflow_rank.forget()


def _close_runs(fluent: Any) -> None:
    """Close the runs that a cell has left open in the rank's main thread; the kernel ends the tracked one itself."""
    run = mlflow_rank.current(fluent)
    not_ours = set[str]() if run is None else {run.id, *run.stand_ins}
    stack = fluent._active_run_stack.get()  # noqa: SLF001 - `end_run` waits for the server
    ids = [each.info.run_id for each in stack if each.info.run_id not in not_ours]
    stack.clear()
    monitors = dict(fluent.run_id_to_system_metrics_monitor)
    fluent.run_id_to_system_metrics_monitor.clear()
    if not ids and not monitors and not (run is not None and run.is_used):
        return

    def end() -> None:
        fluent.flush_async_logging()
        for monitor in monitors.values():
            monitor.finish()
        for each in reversed(ids):
            fluent.MlflowClient().set_terminated(each)

    closing = threading.Thread(target=end, name="jupyter_distrib-mlflow", daemon=True)
    closing.start()
    closing.join(END_S)


def _put_back(fluent: Any) -> None:
    """Restore MLflow's state in the process; the next cell has variables of its own."""
    fluent._active_experiment_id = None  # noqa: SLF001 - mlflow has no way to choose none
    for name in ("_last_active_run_id", "_last_logged_model_id", "_ACTIVE_MODEL_CONTEXT"):
        if (kept := getattr(fluent, name, None)) is not None:
            kept.reset()
    _forget(_STORE, "_tracking_uri")
    _forget(_REGISTRY, "_registry_uri")
    for variable in ("MLFLOW_ACTIVE_MODEL_ID", "_MLFLOW_ACTIVE_MODEL_ID"):
        os.environ.pop(variable, None)
    _stop_autologging()
    _reset_tracing()


def _forget(module: str, name: str) -> None:
    if getattr(sys.modules.get(module), name, None) is not None:
        setattr(sys.modules[module], name, None)


def _stop_autologging() -> None:
    module: Any = sys.modules.get(_AUTOLOGGING)
    if module is None or not is_autologging():
        return
    from mlflow.utils import import_hooks

    for name, settings in list(module.AUTOLOGGING_INTEGRATIONS.items()):
        if settings:
            module.revert_patches(name)
            module.AUTOLOGGING_INTEGRATIONS[name] = {}
    getattr(import_hooks, "_post_import_hooks", {}).clear()  # `mlflow.autolog` waits there for libraries


def _reset_tracing() -> None:
    provider: Any = sys.modules.get("mlflow.tracing.provider")
    once = getattr(getattr(provider, "provider", None), "once", None)
    if not getattr(once, "_done", False):
        return
    from opentelemetry import context

    provider.reset()
    context.attach(context.Context())  # a span that a cell has left open would be the parent of the next cell's spans


def _named_logger(module: ModuleType) -> None:
    """Have Lightning's `MLFlowLogger` log to the tracked run instead of a run that it makes itself."""
    logger: Any = getattr(module, "MLFlowLogger", None)
    if logger is None:
        return
    make = logger.__init__

    def made(self: Any, *arguments: Any, **keywords: Any) -> None:
        mlflow_rank.for_logger(arguments, keywords, make)
        make(self, *arguments, **keywords)

    logger.__init__ = made


MLFLOW = Library(
    modules=("mlflow",),
    extra="mlflow",
    mend={
        _FLUENT: mlflow_rank.mend,
        _STORE: mlflow_rank.mend_tracking_uri,
        _AUTOLOGGING: mlflow_rank.mend_autologging,
        "mlflow.models.model": mlflow_rank.mend_models,
        "mlflow.tracking._model_registry.fluent": mlflow_rank.mend_registry,
        "lightning.pytorch.loggers.mlflow": _named_logger,
        "pytorch_lightning.loggers.mlflow": _named_logger,
    },
    after_cell={_FLUENT: _after_cell},
)
