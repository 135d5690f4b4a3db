"""The content of the page of one run, in progress, ended or saved, and of several runs compared, as JSON values.
Kernel side.

Charts are drawn by the code of the live view, from the columns that it gets (`kernel/views/state.py`).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

from jupyter_distrib.errors import DistributedError, PoolError
from jupyter_distrib.kernel.analysis import failures
from jupyter_distrib.kernel.analysis.metrics import Metrics
from jupyter_distrib.kernel.history import run_files, saved_run
from jupyter_distrib.kernel.history.listing import Comparison, began, last_value, parameters, points
from jupyter_distrib.kernel.history.saved_run import SavedRun, thinned
from jupyter_distrib.kernel.record import not_finite
from jupyter_distrib.kernel.record.over_time import OverTime
from jupyter_distrib.kernel.session.runs.run import Run
from jupyter_distrib.kernel.session.session import Session
from jupyter_distrib.kernel.views import state, timeline
from jupyter_distrib.system import paths
from jupyter_distrib.system.formatting import size

POINTS = 6000
"""Number of points of all charts and ranks of a page together."""
LINE_POINTS = 300
"""Number of points of a line of a compared run."""
MOST_COMPARED = 20
_ENVIRONMENT = "version."
_MOST_RANKS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    """A run, wherever it is known from."""

    saved: SavedRun
    """Its facts, as they are saved; number 0 if it is not saved yet."""
    ranks: list[dict[str, Any]]
    """The ranks with their reported numbers, as the live view gets them."""
    over_time: OverTime | None
    goes_on: bool
    cell: str = ""
    traceback: Sequence[str] = ()


def page(session: Session, name: str, against: str = "") -> dict[str, Any]:
    """Return what is known of a run. Raises `DistributedError` if there is none.

    Args:
        session: The session of the kernel.
        name: The id of a run, or the number of a saved one.
        against: The run with which its code is compared; empty for none.
    """
    shown = _find(session, name)
    run = shown.saved
    known = {name: each for name, each in run.facts.items() if not name.startswith(_ENVIRONMENT)}
    return {
        "page": {
            "run": run.run,
            "number": str(run.number or ""),
            "label": run.label,
            "cell": shown.cell,
            "state": run.state,
            "goes_on": shown.goes_on,
            "error": run.error,
            "traceback": list(shown.traceback),
            "began_at_s": run.began_at_s,
            "elapsed_s": run.elapsed_s,
            "head": _pairs(_head(run)),
            "ranks": shown.ranks,
            "over_time": timeline.as_state(shown.over_time),
            "configuration": _pairs(known),
            "environment": _pairs(
                {each.removeprefix(_ENVIRONMENT): text for each, text in run.facts.items() if each not in known}
            ),
            "code": run.source.splitlines(),
            "difference": _difference(run, _find(session, against).saved) if against else [],
            "notes": [*run.notes, *filter(None, [run.sentence])],
            "files": _pairs({"logs": run.logs, "saved run": run.path, "checkpoints": run.facts.get("checkpoints", "")}),
            "logged": _logged(run, shown.ranks),
        }
    }


def _head(run: SavedRun) -> dict[str, str]:
    return {
        "notebook": run.notebook,
        "began": began(run),
        **{name: last_value(run, name, 6) for name in run.last},
        "peak memory": size(run.peak_rss_bytes) if run.peak_rss_bytes else "",
        "peak GPU memory": size(run.peak_gpu_memory_bytes) if run.peak_gpu_memory_bytes else "",
    }


def _pairs(of: Mapping[str, str]) -> list[list[str]]:
    return [[name, text] for name, text in of.items() if text]


def _difference(run: SavedRun, other: SavedRun) -> list[str]:
    before, now = (str(each.number or each.run) for each in (other, run))
    lines = difflib.unified_diff(other.source.splitlines(), run.source.splitlines(), before, now, lineterm="", n=3)
    return list(lines) or ["the code is the same"]


# ---------------------------------------------------------------------------------------------------- finding


def _find(session: Session, name: str) -> _Shown:
    """Return a run of this kernel by its id, else a saved one by id or number."""
    live = next((run for run in session.history if run.id == name), None)
    if live is not None:
        return _of_session(live, session)
    saved = run_files.find(name)
    own = next((run for run in session.history if run.id == saved.run), None)
    return _of_file(saved, "" if own is None else own.cell_id)


def _of_session(run: Run, session: Session) -> _Shown:
    if (facts := run.observers.facts) is None:  # the run waits for its turn or for ranks
        record = run.record
        waiting = SavedRun(
            number=0, run=run.id, label=record.label, notebook=session.identity.notebook,
            began_at_s=run.clock.began_at_s, elapsed_s=run.elapsed_s, state=run.state,
        )  # fmt: skip
        return _Shown(saved=waiting, ranks=[], over_time=None, goes_on=not run.done(), cell=run.cell_id)
    done = run.done()
    with run.reading() as record:
        known = saved_run.of(facts, record, session.identity.notebook)
        ranks = [
            {"rank": rank.rank, "state": rank.state, "columns": _columns(rank, record)}
            for rank in record.ranks.values()
        ]
        course = timeline.ranks_over_time(record)
        traceback = failures.traceback_of(record) if done else []
    number, path = 0, ""
    if done:
        with suppress(DistributedError):
            kept = run_files.find(run.id)
            number, path = kept.number, kept.path
    logs = known.logs or str(paths.log_directory() / run.id)
    known = replace(
        known, number=number, path=path, logs=logs, state=run.state, elapsed_s=run.elapsed_s,
    )  # fmt: skip
    return _Shown(saved=known, ranks=ranks, over_time=course, goes_on=not done, cell=run.cell_id, traceback=traceback)


def _columns(rank: Any, record: Any) -> dict[str, Any] | None:
    if not rank.history:
        return None
    return state.columns(rank, max(300, POINTS // len(record.ranks)), state.origin(record))


def _of_file(saved: SavedRun, cell: str) -> _Shown:
    """Return a saved run; parts of its file that cannot be read are left out."""
    metrics, course, traceback = Metrics((), ()), None, list[str]()
    with suppress(OSError, ValueError, IndexError):
        metrics = saved.metrics
    with suppress(OSError, ValueError, IndexError):
        course = saved.over_time
    with suppress(OSError, ValueError, IndexError):
        traceback = saved.traceback
    ranks = [
        {"rank": rank, "state": saved.state, "columns": columns_of(metrics, rank)}
        for rank in sorted({int(row["rank"] or 0) for row in metrics})
    ]
    return _Shown(saved=saved, ranks=ranks, over_time=course, goes_on=False, cell=cell, traceback=traceback)


def columns_of(metrics: Metrics, rank: int) -> dict[str, Any]:
    """Return the numbers of a rank as columns, as `views.state.columns` does for a run in progress."""
    rows = [row for row in metrics if row["rank"] == rank]
    odd = {name: not_finite.of_points(metrics[name].get(rank, [])) for name in metrics.names}
    return {
        "step": [row["step"] for row in rows],
        "at": [_seconds(row) for row in rows],
        "left": 0,
        "not_finite": {name: [each.word, each.first, each.last, each.is_now] for name, each in odd.items() if each},
        **{f"={name}": [_number(row[name]) for row in rows] for name in metrics.names},
    }


def _seconds(row: Mapping[str, float | None]) -> float:
    seconds = float(row["seconds"] or 0.0)
    return round(seconds, 1) if isfinite(seconds) else 0.0


def _number(value: float | None) -> float | str | None:
    return None if value is None else state.number(value)


# ---------------------------------------------------------------------------------------------------- logs


def _logged(run: SavedRun, ranks: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the ranks whose logs may be there."""
    numbers = {each["rank"] for each in ranks}
    for part in run.facts.get("ranks", "").rpartition(" ")[2].replace(",", " ").split():
        first, _, last = part.partition("-")
        if first.isdecimal() and (last or first).isdecimal() and int(last or first) < _MOST_RANKS:
            numbers |= set(range(int(first), int(last or first) + 1))
    return sorted(numbers) or [0]


def log_file(session: Session, name: str, rank: int) -> Path:
    """Return the path of a rank's log, of a run of this kernel or of a saved one. Raises `DistributedError`."""
    if (run := next((each for each in session.history if each.id == name), None)) is not None:
        return run.log_file(rank)
    saved = run_files.find(name)
    path = Path(saved.logs or paths.log_directory() / saved.run) / f"rank{rank}.log"
    if not path.is_file():
        raise PoolError(f"the logs of this run are not there any more: {path.parent}")
    return path


# ---------------------------------------------------------------------------------------------------- several runs


def compared(names: Sequence[str]) -> dict[str, Any]:
    """Return saved runs side by side: what differs, their numbers, parameters and code. Raises
    `DistributedError`."""
    if not 1 <= len(names) <= MOST_COMPARED:
        raise DistributedError(f"choose 2 to {MOST_COMPARED} runs to compare, not {len(names)}.")
    comparison = Comparison(tuple(run_files.find(name) for name in names))
    table = comparison.table()
    return {
        "comparison": {
            "head": table.head,
            "rows": table.rows,
            "ranks": [{"rank": run.number, "state": run.state, "columns": _line_columns(run)} for run in comparison],
            "parameters": [parameters(run) for run in comparison],
            "last": [{name: value for name, value in run.last.items() if isfinite(value)} for run in comparison],
            "code": list(comparison.code()),
        }
    }


def _line_columns(run: SavedRun) -> dict[str, Any]:
    """Return the line of each metric of a run, as columns of all of them."""
    lines = {name: (dict(thinned(line, LINE_POINTS)), odd) for name, line, odd in points(run)}
    steps = sorted({step for line, _ in lines.values() for step in line})
    seconds: dict[float, float] = {}
    with suppress(OSError, ValueError, IndexError):
        for row in run.metrics:
            seconds.setdefault(float(row["step"] or 0), _seconds(row))
    return {
        "step": steps,
        **({"at": [seconds[step] for step in steps]} if seconds.keys() >= set(steps) else {}),
        "left": 0,
        "not_finite": {name: [odd.word, odd.first, odd.last, odd.is_now] for name, (_, odd) in lines.items() if odd},
        **{f"={name}": [line.get(step) for step in steps] for name, (line, _) in lines.items()},
    }
