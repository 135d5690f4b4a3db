"""The tracked MLflow run of a cell on a rank: MLflow's functions log to it, and to no second run.

The kernel has made the run (`kernel/trackers/mlflow.py`), and a variable names it. It is the active run on every rank,
and one rank logs: on the others the functions that log, also those for models and autologging, do nothing, and runs
that begin there are stand-ins with an id. `mlflow.set_experiment` and `set_tracking_uri` move the run as long as
nothing is in it. A store that cannot be used costs one sentence, and the training goes on. Rank's main thread.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
import time
import uuid
from collections.abc import Callable
from typing import Any

from jupyter_distrib.libraries import mlflow_store
from jupyter_distrib.libraries.mlflow_store import RUN_VARIABLE, Tracked

FIND_S = 10.0
"""Maximum seconds that a rank waits for an MLflow run that the kernel or the logging rank is about to make."""
FIND_EVERY_S = 0.05
QUIET_S = 30.0
"""Seconds after a failure in which nothing is sent to the store, since each attempt may take long."""


class CellRun:
    """The tracked run of the running cell.

    Args:
        fluent: The module `mlflow.tracking.fluent`.
        text: The value of the variable.
    """

    def __init__(self, fluent: Any, text: str) -> None:
        self.text, self.fluent = text, fluent
        self.tracked = Tracked.of(text)
        self.id, self.experiment = self.tracked.id, self.tracked.experiment or mlflow_store.DEFAULT_EXPERIMENT
        self.experiment_name = self.tracked.experiment_name
        self.uri = self.tracked.uri
        self.away = self.tracked.away
        self.is_begun = False
        """Whether the cell has begun the run itself, by `start_run`."""
        self.is_used = False
        """Whether the run may contain something, so that it stays where it is."""
        self.is_ended = False
        """Whether the cell has ended the run, so that the next one is a different run."""
        self.is_elsewhere = False
        """Whether the logging rank may have moved it, so that its id has to be found again."""
        self.stand_ins: set[str] = set()
        """The ids of runs to which this rank does not log: no store has them, or another rank logs."""
        self._from_before: dict[str, bool] = {}
        self._quiet_until_s = 0.0
        self._said: set[str] = set()

    @property
    def writes(self) -> bool:
        """Return whether this rank logs to the run."""
        return os.environ.get("RANK") == str(self.tracked.rank)

    def may_log(self, run_id: str | None) -> bool:
        """Return whether a call that logs to this run, or without an id to the active one, goes to a store."""
        if run_id is None:
            active = self.fluent.active_run()
            run_id = self.id if active is None else active.info.run_id
        if not self.writes and (run_id == self.id or self.is_from_before(run_id)):
            return False
        return run_id not in self.stand_ins and not self.away and time.monotonic() >= self._quiet_until_s

    def is_from_before(self, run_id: str) -> bool:
        """Return whether this run is older than the tracked one and was not begun here: then all ranks know it, and all
        would log to it. A run begun with `nested=True` is this rank's choice."""
        if run_id in self.stand_ins or any(each.info.run_id == run_id for each in self.stack):
            return False
        if run_id not in self._from_before:
            self.know_id()
            try:
                client = self.fluent.MlflowClient()
                began = [client.get_run(each).info.start_time for each in (run_id, self.id)]
            except Exception:  # noqa: BLE001 - of any store; the logging rank says it
                return True
            self._from_before[run_id] = began[0] < began[1]
        return self._from_before[run_id]

    def say(self, text: str) -> None:
        """Print a sentence, once in a cell."""
        if text not in self._said:
            self._said.add(text)
            print(text, flush=True)

    def failed(self, what: str, error: Exception) -> None:
        """Say why something could not be done; if the store did not answer, leave it alone for a while."""
        if getattr(error, "error_code", "") not in _ANSWERS:
            self._quiet_until_s = time.monotonic() + QUIET_S
        if self.writes:
            self.say(f"MLflow: {what}: {mlflow_store.reason(error)}. The training goes on.")

    # ------------------------------------------------------------------------------------------------ the active run

    def enter(self, name: str | None = None) -> Any:
        """Make the tracked run the active one of this thread, without asking the store, and return it."""
        self.know_id()
        if self.away:
            self.stand_ins.add(self.id)
        elif self.writes and not self.is_used and self.fluent.MlflowClient().tracking_uri != self.uri:
            # by `mlflow.set_tracking_uri` in the cell
            chosen = self.fluent._active_experiment_id or mlflow_store.DEFAULT_EXPERIMENT  # noqa: SLF001
            guarded(self, "the run stays in the notebook's store", lambda: self.go_to(chosen, ""))
        return self._push(self.id, self.experiment, name or self.tracked.name, self.tracked.artifacts)

    def know_id(self) -> None:
        """Find out the id of the run, unless it is known."""
        if self.is_elsewhere and not (self.writes or self.away):
            self.adopt_moved_id()
            self.stack.clear()
        if not self.id and not self.away:
            self._find()
        if not self.id:
            self.id, self.away = uuid.uuid4().hex, True

    def reopen(self) -> None:
        """Make the run active again if the cell, or a library in it, has ended it and then logs on."""
        if self.is_ended and not self.stack:
            self.is_begun = self.is_ended = False
            self.enter()

    def enter_stand_in(self, name: str | None, run_id: str | None = None) -> Any:
        """Begin a run to which this rank does not log: another rank's run, or one that is in no store."""
        made = run_id or uuid.uuid4().hex
        self.stand_ins.add(made)
        return self._push(made, self.experiment, name or "", "")

    def _push(self, run_id: str, experiment: str, name: str, artifacts: str) -> Any:
        from mlflow.entities import Run, RunData, RunInfo

        info = RunInfo(
            run_id=run_id,
            experiment_id=experiment,
            user_id=mlflow_store.user(),
            status="RUNNING",
            start_time=int(time.time() * 1000),
            end_time=None,
            lifecycle_stage="active",
            artifact_uri=artifacts or None,
            run_name=name,
        )
        active = self.fluent.ActiveRun(Run(info, RunData()))
        self.stack.append(active)
        return active

    @property
    def stack(self) -> list[Any]:
        """The active runs of this thread, the outermost first."""
        found: list[Any] = self.fluent._active_run_stack.get()  # noqa: SLF001 - mlflow has no other way
        return found

    def _find(self) -> None:
        """Wait until the run has been made, and find it by its tag."""
        until_s = time.monotonic() + FIND_S
        try:
            while time.monotonic() < until_s:
                client = self.fluent.MlflowClient()
                if (made := mlflow_store.find_run(client, _experiments(client), self.tracked.run)) is not None:
                    self.id, self.experiment = made.info.run_id, made.info.experiment_id
                    os.environ["MLFLOW_RUN_ID"] = self.id
                    return
                time.sleep(FIND_EVERY_S)
        except Exception as error:  # noqa: BLE001 - of any store
            self.failed("the run of this cell was not found", error)
            self.away = True

    # ------------------------------------------------------------------------------------------------ another place

    def go_to(self, experiment: str, name: str) -> None:
        """Move the run to an experiment of the store that is now in use, unless something is in it already."""
        uri = self.fluent.MlflowClient().tracking_uri
        if self.away or self.is_used or not self.id or (experiment == self.experiment and uri == self.uri):
            return
        client, old = self.fluent.MlflowClient(), self.fluent.MlflowClient(self.uri)
        made = mlflow_store.move(client, old, self.id, experiment, uri)
        self.id, self.experiment, self.experiment_name, self.uri = made.info.run_id, experiment, name, uri
        os.environ.update(MLFLOW_RUN_ID=self.id, MLFLOW_EXPERIMENT_ID=experiment)
        os.environ.pop("MLFLOW_EXPERIMENT_NAME", None)

    def adopt_moved_id(self) -> None:
        """Take the id of the run over from the logging rank, which may have moved it."""
        self.is_elsewhere = False
        until_s = time.monotonic() + FIND_S
        try:
            while time.monotonic() < until_s:
                moved = mlflow_store.moved_to(self.fluent.MlflowClient(self.uri), self.id)
                if moved is not None:
                    self.id, self.uri = moved
                    return
                time.sleep(FIND_EVERY_S)
        except Exception as error:  # noqa: BLE001 - of any store
            self.failed("the run of this cell was not found again", error)


_now: CellRun | None = None


def current(fluent: Any) -> CellRun | None:
    """Return the tracked run of the running cell; None if it is not tracked."""
    global _now
    text = os.environ.get(RUN_VARIABLE, "")
    if _now is None or _now.text != text:
        _now = CellRun(fluent, text) if text else None
    return _now


def forget() -> None:
    """Forget the run of the cell that has ended."""
    global _now
    _now = None


def _experiments(client: Any) -> list[str]:
    number, name = os.environ.get("MLFLOW_EXPERIMENT_ID"), os.environ.get("MLFLOW_EXPERIMENT_NAME")
    if number or not name:
        return [number or mlflow_store.DEFAULT_EXPERIMENT]
    experiment = client.get_experiment_by_name(name)
    return [] if experiment is None else [experiment.experiment_id]


# Replaced functions of `mlflow.tracking.fluent`.


def mend(fluent: Any) -> None:
    """Have MLflow's functions use the tracked run."""
    for name, function in list(vars(fluent).items()):
        if inspect.isfunction(function) and (name.startswith("log_") or name in _SETTERS):
            setattr(fluent, name, _logging(fluent, function))
    for name, make in _REPLACED.items():
        setattr(fluent, name, make(fluent, getattr(fluent, name)))


_SETTERS = ("set_tag", "set_tags", "delete_tag", "set_experiment_tag", "set_experiment_tags")


def _logging(fluent: Any, log: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(log)
    def logged(*arguments: Any, **keywords: Any) -> Any:
        if (run := current(fluent)) is None:
            return log(*arguments, **keywords)
        if not run.may_log(keywords.get("run_id")):
            return None
        if keywords.get("run_id") is None:
            run.reopen()
        run.is_used = True
        return guarded(run, f"{log.__name__} could not be done", lambda: log(*arguments, **keywords))

    return logged


def _start_run(fluent: Any, start_run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(start_run)
    def started(run_id: str | None = None, *arguments: Any, **keywords: Any) -> Any:
        if (run := current(fluent)) is None:
            return start_run(run_id, *arguments, **keywords)
        given = inspect.signature(start_run).bind(run_id, *arguments, **keywords).arguments
        run.know_id()
        is_its_own = run_id in (run.id, run.tracked.id) or (run_id is None and not run.is_ended)
        if given.get("nested") and run_id is None:
            fluent.active_run()  # it belongs to the tracked run, which may not have been used before
            return _another(run, start_run, given)
        stack = run.stack
        if is_its_own and (not stack or (len(stack) == 1 and stack[0].info.run_id == run.id and not run.is_begun)):
            return _begun(run, given)
        return _another(run, start_run, given)

    return started


def _begun(run: CellRun, given: dict[str, Any]) -> Any:
    """Begin the tracked run for `start_run`, with the name and the tags that it was given."""
    if (experiment := given.get("experiment_id")) is not None and not run.is_used:
        run.is_elsewhere = str(experiment) != run.experiment
        if run.writes:
            guarded(run, "the run stays in its experiment", lambda: run.go_to(str(experiment), ""))
            run.stack.clear()
    run.is_begun, run.is_ended, run.is_used = True, False, True
    _forget_the_variable()
    if run.stack and given.get("run_name"):
        run.stack.clear()  # it is entered again with its name
    active = run.stack[-1] if run.stack else run.enter(given.get("run_name"))
    tags = dict(given.get("tags") or {})
    if description := given.get("description"):
        tags["mlflow.note.content"] = description
    if name := given.get("run_name"):
        tags["mlflow.runName"] = name
    if tags and run.may_log(None):
        client = run.fluent.MlflowClient()
        guarded(run, "the run's tags are not set", lambda: [client.set_tag(run.id, *item) for item in tags.items()])
    return active


def _another(run: CellRun, start_run: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Begin a run beside or below the tracked one: on the logging rank, or by its id on any rank."""
    if run.stack and not given.get("nested"):
        return start_run(**given)  # which raises an error, since a run is active
    _forget_the_variable()
    by_id = given.get("run_id") is not None
    if by_id and not (run.writes or given.get("nested")) and run.is_from_before(given["run_id"]):
        return run.enter_stand_in(given.get("run_name"), given["run_id"])
    if run.away or not (by_id or run.writes) or (run.stack and run.stack[-1].info.run_id in run.stand_ins):
        return run.enter_stand_in(given.get("run_name"))
    if not (by_id or run.stack or given.get("parent_run_id")) and run.fluent._active_experiment_id in (  # noqa: SLF001
        None,
        run.experiment,
    ):
        given = {**given, "parent_run_id": run.id}
    begun = guarded(run, "another run could not be begun", lambda: start_run(**given))
    if begun is None and by_id and not run.stack and not run.is_ended:
        return _begun(run, {})  # later calls log to the run of the cell
    return run.enter_stand_in(given.get("run_name")) if begun is None else begun


def _forget_the_variable() -> None:
    """Remove the variable that names the tracked run, as MLflow does once a run has begun: Transformers' Trainer begins
    the run that it finds there, also while one is active."""
    os.environ.pop("MLFLOW_RUN_ID", None)


def _end_run(fluent: Any, end_run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(end_run)
    def ended(*arguments: Any, **keywords: Any) -> Any:
        run = current(fluent)
        if run is None or not run.stack:
            return end_run(*arguments, **keywords)
        active = run.stack[-1].info.run_id
        if active != run.id and active not in run.stand_ins:
            return guarded(run, "a run could not be ended", lambda: end_run(*arguments, **keywords))
        run.stack.pop()  # the kernel ends it, and knows how the cell ended
        fluent._last_active_run_id.set(active)  # noqa: SLF001
        run.is_ended = run.is_ended or active == run.id
        return None

    return ended


def _active_run(fluent: Any, active_run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(active_run)
    def active() -> Any:
        run = current(fluent)
        if run is None:
            return active_run()
        run.know_id()
        if not run.stack and not run.is_ended:
            run.enter()
        return active_run()

    return active


def _set_experiment(fluent: Any, set_experiment: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(set_experiment)
    def chosen(experiment_name: str | None = None, experiment_id: str | None = None, **keywords: Any) -> Any:
        run = current(fluent)
        if run is None or (experiment_name is None) is (experiment_id is None):
            return set_experiment(experiment_name, experiment_id, **keywords)
        is_here = experiment_name == run.experiment_name if experiment_id is None else experiment_id == run.experiment
        if run.away or not run.writes:
            run.is_elsewhere = not (is_here or run.away or run.is_used)
            return _experiment(run, experiment_name, experiment_id)

        def choose() -> Any:
            found = set_experiment(experiment_name, experiment_id, **keywords)
            if not run.is_begun and not run.is_used:
                run.stack.clear()
                run.go_to(found.experiment_id, found.name)
            return found

        found = guarded(run, "the experiment stays as it was", choose)
        return _experiment(run, experiment_name, experiment_id) if found is None else found

    return chosen


def _create_experiment(fluent: Any, create_experiment: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(create_experiment)
    def made(name: str, *arguments: Any, **keywords: Any) -> Any:
        run = current(fluent)
        if run is None or run.writes or run.away:
            return create_experiment(name, *arguments, **keywords)
        until_s = time.monotonic() + FIND_S
        while (found := fluent.MlflowClient().get_experiment_by_name(name)) is None and time.monotonic() < until_s:
            time.sleep(FIND_EVERY_S)  # the logging rank makes it
        return create_experiment(name, *arguments, **keywords) if found is None else found.experiment_id

    return made


def _set_tracking_uri(module: Any, set_tracking_uri: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(set_tracking_uri)
    def chosen(uri: Any) -> Any:
        run = current(sys.modules["mlflow.tracking.fluent"])
        answer = set_tracking_uri(mlflow_store.anywhere(uri) if run is not None and isinstance(uri, str) else uri)
        if run is not None and not run.is_used:
            run.is_elsewhere = module.get_tracking_uri() != run.uri
        return answer

    return chosen


def mend_tracking_uri(module: Any) -> None:
    """Have `mlflow.set_tracking_uri` in a cell move the tracked run."""
    module.set_tracking_uri = _set_tracking_uri(module, module.set_tracking_uri)


def _experiment(run: CellRun, name: str | None, number: str | None) -> Any:
    """Return a stand-in for an experiment."""
    from mlflow.entities import Experiment

    return Experiment(number or run.experiment, name or run.experiment_name, "", "active")


_REPLACED = {
    "start_run": _start_run,
    "end_run": _end_run,
    "active_run": _active_run,
    "set_experiment": _set_experiment,
    "create_experiment": _create_experiment,
}


# Errors.

_ANSWERS = ("INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS")
"""Errors with which a store answers, after which it can be asked again."""


def guarded(run: CellRun, what: str, call: Callable[[], Any]) -> Any:
    """Return the result of a call; if the store is to blame for its failure, say so and return None."""
    try:
        with mlflow_store.unlogged():
            return call()
    except Exception as error:
        if not _is_of_store(error):
            raise
        run.failed(what, error)
        return None


def _is_of_store(error: Exception) -> bool:
    """Return whether an error is about the store, and not about what the cell has given to MLflow."""
    from mlflow.exceptions import MlflowException

    if isinstance(error, MlflowException):
        ours = ("Changing param", "'active' state", "deleted", "does not exist", "not found")
        return error.error_code != "INVALID_PARAMETER_VALUE" or any(part in str(error) for part in ours)
    if type(error).__module__.partition(".")[0] in ("sqlalchemy", "sqlite3", "alembic", "requests", "urllib3"):
        return True
    return isinstance(error, OSError) and not isinstance(error, (FileNotFoundError, IsADirectoryError))


# Models and autologging, which do not go through these functions.


def mend_models(module: Any) -> None:
    """Let only the logging rank log models."""
    log = module.Model.log.__func__

    @functools.wraps(log)
    def logged(cls: Any, *arguments: Any, **keywords: Any) -> Any:
        import mlflow.tracking.fluent as fluent  # noqa: PLR0402 - the module, since `mlflow.tracking` is loaded

        run, run_id = current(fluent), keywords.get("run_id")
        if run is None or (run_id is not None and run.may_log(run_id)):
            return log(cls, *arguments, **keywords)
        name = str(keywords.get("name") or (arguments[0] if arguments else keywords.get("artifact_path")) or "model")
        if run_id is not None or not run.may_log(None):
            return _model(module, run, name)
        run.reopen()
        run.is_used = True
        made = guarded(run, f"the model {name!r} is not logged", lambda: log(cls, *arguments, **keywords))
        return _model(module, run, name) if made is None else made

    module.Model.log = classmethod(logged)


def _model(module: Any, run: CellRun, name: str) -> Any:
    """Return a stand-in for the description of a logged model."""
    return module.ModelInfo(
        artifact_path=name, flavors={}, model_uri=f"runs:/{run.id}/{name}", model_uuid="", run_id=run.id,
        saved_input_example_info=None, signature=None, utc_time_created="", mlflow_version="",
    )  # fmt: skip


def mend_registry(module: Any) -> None:
    """Let only the logging rank register models."""
    register_model = module.register_model

    @functools.wraps(register_model)
    def registered(model_uri: str, name: str, *arguments: Any, **keywords: Any) -> Any:
        import mlflow.tracking.fluent as fluent  # noqa: PLR0402 - the module, since `mlflow.tracking` is loaded
        from mlflow.entities.model_registry import ModelVersion

        run = current(fluent)
        if run is None or run.writes:
            return register_model(model_uri, name, *arguments, **keywords)
        return ModelVersion(name, "", 0, source=model_uri)

    module.register_model = registered


def mend_autologging(module: Any) -> None:
    """Let only the logging rank use autologging."""
    is_disabled = module.autologging_is_disabled

    @functools.wraps(is_disabled)
    def disabled(integration_name: str) -> bool:
        text = os.environ.get(RUN_VARIABLE)
        if text and os.environ.get("RANK") != str(json.loads(text)["rank"]):
            return True
        return bool(is_disabled(integration_name))

    module.autologging_is_disabled = disabled


def for_logger(arguments: tuple[Any, ...], keywords: dict[str, Any], make: Callable[..., Any]) -> None:
    """Add the id of the tracked run to the arguments of Lightning's logger, unless it names another run or store."""
    import mlflow
    import mlflow.tracking.fluent as fluent  # noqa: PLR0402

    if (run := current(fluent)) is None:
        return
    given = inspect.signature(make).bind(None, *arguments, **keywords).arguments
    uri = mlflow_store.anywhere(given.get("tracking_uri") or run.uri)
    if given.get("run_id") is not None or uri != run.uri or given.get("save_dir"):
        return
    if (name := given.get("experiment_name")) not in (None, "lightning_logs", run.experiment_name):
        mlflow.set_experiment(name)
    if run.writes and fluent.active_run() is not None and not run.away:
        run.is_used = True
        keywords.update(run_id=run.id, tracking_uri=run.uri)
