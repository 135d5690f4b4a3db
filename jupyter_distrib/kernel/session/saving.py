"""Saves runs in the history, as the settings have it. Kernel side; in the history's thread, which imports what no cell
needs, or in that of a magic."""

from __future__ import annotations

from collections.abc import Sequence

from jupyter_distrib.kernel.history import run_files, saved_run
from jupyter_distrib.kernel.history.run_files import Limits
from jupyter_distrib.kernel.history.saved_run import SavedRun
from jupyter_distrib.kernel.record.observer import ObservedRun
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.kernel.settings.settings import Settings


def save(runs: Sequence[tuple[ObservedRun, RunRecord]], settings: Settings, notebook: str) -> None:
    """Save runs that have ended, unless the settings say otherwise. Raises `OSError`, `PoolError`."""
    put([(saved_run.of(run, record, notebook, settings.project), record) for run, record in runs], settings)


def put(runs: Sequence[tuple[SavedRun, RunRecord]], settings: Settings) -> None:
    """Save these runs, unless the settings say otherwise. Raises `OSError`, `PoolError`."""
    own = settings.project_history
    if settings.saves_runs:
        limits = Limits(
            runs=int(settings.history) or None,
            days=settings.history_days,
            project=settings.project,
            project_runs=None if own is None else int(own) or None,
            project_days=settings.project_history_days,
        )
        run_files.save(runs, limits)
