"""Makes and finds the MLflow run that tracks a run, and says in one sentence why a store cannot be used. The kernel
makes the run; a rank does so when its cell chooses another experiment or store. Loads MLflow only in its functions."""

from __future__ import annotations

import contextlib
import getpass
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

RUN_VARIABLE = "JUPYTER_DISTRIB_MLFLOW"
"""Environment variable with a `Tracked`, by which ranks find the MLflow run of their cell."""
RUN_TAG = "jupyter_distrib.run"
"""Tag of an MLflow run with the id of the run that it tracks."""
MOVED_TAG = "jupyter_distrib.moved"
"""Tag of an MLflow run that another run has replaced: the id of the new run, and the address of its store."""
DEFAULT_EXPERIMENT = "0"
REASON_CHARACTERS = 300
LOCKED_S = 2.0
"""Maximum seconds to wait for a local database that another program has locked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracked:
    """The MLflow run of a cell, as ranks know it."""

    run: str
    """The id of the run that it tracks."""
    rank: int
    """The rank that logs to it."""
    uri: str
    """The address of the store."""
    id: str = ""
    """The MLflow run's id; empty if it is not made yet, or never will be."""
    experiment: str = ""
    experiment_name: str = ""
    name: str = ""
    """The MLflow run's name."""
    artifacts: str = ""
    """The address of its artifacts."""
    away: bool = False
    """Whether the kernel could not make it, so that nothing is logged."""

    def text(self) -> str:
        """Return the value of `RUN_VARIABLE`."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> Tracked:
        """Return the run that `text` has encoded."""
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class MLflowUse:
    """The places that a cell's code names for its MLflow run, as far as they can be read without running it."""

    experiment: str = ""
    """The name in `mlflow.set_experiment("NAME")`."""
    experiment_id: str = ""
    uri: str = ""
    """The address in `mlflow.set_tracking_uri("ADDRESS")`."""


def anywhere(uri: str) -> str:
    """Return the address of a store; the address of a local database stays valid in a process that changes its
    folder."""
    scheme, path = "sqlite:///", uri.removeprefix("sqlite:///")
    is_relative = path != uri and path and not path.startswith(("/", ":", "file:"))
    return f"{scheme}{os.path.abspath(path)}" if is_relative else uri


def find_run(client: Any, experiments: list[str], run: str) -> Any:
    """Return the MLflow run that tracks a run; None if there is none in these experiments."""
    found = client.search_runs(experiments, filter_string=f"tags.`{RUN_TAG}` = '{run}'", max_results=1)
    return found[0] if found else None


def store_of(client: Any) -> Any:
    """Return the store behind a client, which prints nothing."""
    return client._tracking_client.store  # noqa: SLF001 - mlflow has no other way


def experiment_id(client: Any, name: str) -> str:
    """Return the id of the experiment with this name, which is made if there is none."""
    from mlflow.exceptions import MlflowException

    if (found := client.get_experiment_by_name(name)) is None:
        try:
            return str(client.create_experiment(name))
        except MlflowException:
            if (found := client.get_experiment_by_name(name)) is None:  # else another process has made it meanwhile
                raise
    return str(found.experiment_id)


def make_run(client: Any, experiment: str, name: str, began_at_s: float, tags: Mapping[str, str]) -> Any:
    """Make an MLflow run and return it."""
    return client.create_run(experiment, start_time=int(began_at_s * 1000), tags=dict(tags), run_name=name)


def check_file(uri: str) -> None:
    """Raise `OSError` at once for a local database that is locked, cannot be written, or is not a database: MLflow
    would wait for half a minute and log pages."""
    path = uri.partition("?")[0].removeprefix("sqlite:///")
    if path == uri or not os.path.isfile(path):
        return
    import sqlite3  # the store needs it as well

    try:
        with contextlib.closing(sqlite3.connect(path, timeout=LOCKED_S)) as database:
            database.execute("begin immediate")
            database.rollback()
    except sqlite3.Error as error:
        raise OSError(f"the store {path} cannot be used: {error}") from None


@contextlib.contextmanager
def unlogged() -> Iterator[None]:
    """Keep MLflow from logging the errors of a database."""
    logger = logging.getLogger("mlflow.store.db.utils")
    logger.addFilter(_is_no_error)
    try:
        yield
    finally:
        logger.removeFilter(_is_no_error)


def _is_no_error(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR


def user() -> str:
    """Return the name of the user, as far as the system knows one."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a uid without a name
        return "unknown"


def resume(client: Any, run_id: str) -> Any:
    """Return an MLflow run that goes on. Raises an error if it is missing or deleted."""
    from mlflow.entities import RunStatus

    found = client.get_run(run_id)
    if found.info.lifecycle_stage != "active":
        raise LookupError(f"the MLflow run {run_id} is deleted")
    store_of(client).update_run_info(run_id, RunStatus.RUNNING, None, None)
    return found


def move(client: Any, old: Any, run_id: str, experiment: str, uri: str) -> Any:
    """Make an MLflow run in another experiment or store in place of one, which is deleted, and return it.

    Args:
        client: The client of the new run's store.
        old: The client of the old run's store.
        run_id: The old MLflow run.
        experiment: The id of the experiment.
        uri: The address of the new run's store.
    """
    found = old.get_run(run_id)
    own = ("mlflow.parentRunId", "mlflow.runName")
    tags = {key: value for key, value in found.data.tags.items() if key not in own}
    made = make_run(client, experiment, found.info.run_name, found.info.start_time / 1000, tags)
    old.set_tag(run_id, MOVED_TAG, json.dumps([made.info.run_id, uri]))
    old.delete_run(run_id)
    return made


def moved_to(client: Any, run_id: str) -> tuple[str, str] | None:
    """Return the id and the store of the MLflow run that has replaced this one; None if none has."""
    moved = client.get_run(run_id).data.tags.get(MOVED_TAG)
    if not moved:
        return None
    new_id, uri = json.loads(moved)
    return str(new_id), str(uri)


def reason(error: BaseException) -> str:
    """Return the message of an error of a store, as part of a sentence: without the statement of a database."""
    text = str(error) or type(error).__name__
    if of_database := re.search(r"\(\w+\.\w+\) ([^\n]+)", text):
        text = of_database[1]
    text = re.split(r"\n|\[SQL|\(Background on this error", text)[0]
    text = re.sub(r"^\w+: (?=[A-Z(])", "", text).strip().rstrip(".")
    if len(text) > REASON_CHARACTERS:
        text = text[:REASON_CHARACTERS].rstrip() + "..."
    return text[:1].lower() + text[1:] if text[1:2].islower() else text
