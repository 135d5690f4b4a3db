"""Saves runs in the history, if the settings say so: runs that have ended, and detached runs that were lost in a
reboot or to the out-of-memory killer, with every process that knew them. For a lost run, gives the place of its logs
and checkpoints.

Kernel side; in the history's thread, which imports what no cell needs, or in that of a magic.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from jupyter_distrib.errors import DistributedError, PoolError
from jupyter_distrib.kernel.history import run_files, saved_run
from jupyter_distrib.kernel.history.run_files import Limits
from jupyter_distrib.kernel.history.saved_run import SavedRun
from jupyter_distrib.kernel.record.observer import ObservedRun
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.kernel.session.pools.kernel_identity import KernelIdentity
from jupyter_distrib.kernel.settings.settings import Settings
from jupyter_distrib.system import last_seen, paths
from jupyter_distrib.system.last_seen import SeenRun


def save(runs: Sequence[tuple[ObservedRun, RunRecord]], settings: Settings, notebook: str) -> None:
    """Save runs that have ended, unless the settings say otherwise. Raises `OSError`, `PoolError`."""
    _put([(saved_run.of(run, record, notebook, settings.project), record) for run, record in runs], settings)


def _put(runs: Sequence[tuple[SavedRun, RunRecord]], settings: Settings) -> None:
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


def id_of(number: str) -> str:
    """Return the id of the saved run with this number; empty if there is none, or it cannot be read."""
    with suppress(DistributedError):
        return run_files.find(number).run
    return ""


def not_here(number: str, run: str) -> str:
    """Return a sentence about a saved run of another kernel, with the place of its logs if they are there."""
    folder = paths.log_directory() / run
    logs = f" and its logs are in {folder}" if folder.is_dir() else ""
    return f"run {number} is {run} of another kernel: `%distributed_runs {number}` shows it{logs}."


def lost() -> list[tuple[SeenRun, str]]:
    """Return the runs that no process holds any more, each with the cause; those seen last come last."""
    return [(run, cause) for run in last_seen.runs() if (cause := run.cause_of_loss())]


def about_lost(name: str | None, identity: KernelIdentity) -> str:
    """Return a sentence about the lost run with this id or number; for None about the last one of this notebook, else
    of any. Empty if no such run was lost."""
    every = lost()
    matching = [each for each in every if name is None or name == each[0].run or each[0].run.endswith(f"-{name}")]
    own = [each for each in matching if identity.notebook and each[0].notebook == identity.notebook]
    return _sentence(*(own or matching)[-1]) if matching else ""


def _sentence(run: SeenRun, cause: str) -> str:
    places = [f"Its logs are in {run.logs}." if run.logs else "It has left no logs."]
    if run.checkpoints:
        places.append(f"It saved checkpoints into {' and '.join(run.checkpoints)}.")
    end = "has ended, but its return values were lost" if run.ended else "was lost"
    what = f"the detached run {run.run} ({run.label} of {run.holder}) {end}: {cause}"
    return " ".join([f"{what}. It was last seen {_date(run.seen_at_s)}.", *places])


def _date(at_s: float) -> str:
    return time.strftime("on %d %b %Y at %H:%M", time.localtime(at_s))


def save_lost(settings: Settings) -> None:
    """Save lost runs that are not in the history yet; if it cannot be written, the next call tries again."""
    new = [(run, cause) for run, cause in lost() if not (run.saved or run.ended)]
    if new:
        with suppress(OSError, PoolError):
            _put([_saved(run, cause) for run, cause in new], settings)
            for run, _ in new:
                last_seen.write(replace(run, saved=True))


def _saved(run: SeenRun, cause: str) -> tuple[SavedRun, RunRecord]:
    facts = {"logs": run.logs, "checkpoints": ", ".join(run.checkpoints)}
    saved = SavedRun(
        number=0,
        run=run.run,
        label=run.label,
        notebook=run.notebook,
        began_at_s=run.began_at_s,
        elapsed_s=max(0.0, run.seen_at_s - run.began_at_s),
        state="lost",
        error=f"{cause}; last seen {_date(run.seen_at_s)}",
        facts={name: text for name, text in facts.items() if text},
    )
    return saved, RunRecord(run=run.run, label=run.label, ranks=[], world_size=0, strategy="")
