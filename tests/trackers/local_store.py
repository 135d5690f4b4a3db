"""A kernel whose MLflow has a local database, and what the database holds then, read without MLflow."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.notebook import Notebook
from tests.processes import wait_until
from tests.trackers.conftest import QUIET

LOAD = """\
%load_ext jupyter_distrib
import os, jupyter_distrib
from jupyter_distrib import distributed"""


@dataclass
class Recorded:
    """A run of the database that is not deleted."""

    id: str
    name: str
    status: str
    experiment: str
    params: dict[str, str]
    tags: dict[str, str]
    metrics: dict[str, list[float]]


@contextmanager
def opened(folder: Path, **env: str) -> Iterator[Notebook]:
    """A notebook in this folder, which may have a store from before."""
    with Notebook(folder, env={**QUIET, "MLFLOW_TRACKING_URI": "sqlite:///ml.db", **env}) as book:
        book.ok(LOAD)
        yield book


def runs(
    folder: Path, count: int | None = None, *, file: str = "ml.db", known: set[str] | None = None
) -> list[Recorded]:
    """The runs of the store, oldest first, once none is going on; `known` are ids to leave out."""
    found: list[Recorded] = []

    def settled() -> bool:
        found[:] = [each for each in _read(folder / file) if each.id not in (known or ())]
        return all(each.status != "RUNNING" for each in found) and (count is None or len(found) >= count)

    wait_until(settled, 20)
    assert count is None or len(found) == count, found
    return found


def _read(file: Path) -> list[Recorded]:
    if not file.exists():
        return []
    with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as database:
        try:
            rows = database.execute(
                "select r.run_uuid, r.name, r.status, e.name from runs r join experiments e using (experiment_id)"
                " where r.lifecycle_stage = 'active' order by r.start_time, r.rowid"
            ).fetchall()
        except sqlite3.OperationalError:  # its tables are being made
            return []
        made = []
        for run, name, status, experiment in rows:
            params = dict(database.execute("select key, value from params where run_uuid = ?", [run]))
            tags = dict(database.execute("select key, value from tags where run_uuid = ?", [run]))
            metrics: dict[str, list[float]] = {}
            points = "select key, value from metrics where run_uuid = ? order by key, step, timestamp"
            for key, value in database.execute(points, [run]):
                metrics.setdefault(key, []).append(value)
            made.append(Recorded(run, name, status, experiment, params, tags, metrics))
    return made
