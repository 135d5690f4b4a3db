"""The small record of one run that outlives its kernel. Kernel side; plain data, as two lines of JSON in a file.

The first line holds what lists and searches need, the second the reported numbers.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from jupyter_distrib.kernel.analysis import failures, run_facts
from jupyter_distrib.kernel.analysis.metrics import OWN_COLUMNS, Metrics
from jupyter_distrib.kernel.analysis.shares import Shares
from jupyter_distrib.kernel.record import not_finite
from jupyter_distrib.kernel.record.not_finite import NotFinite
from jupyter_distrib.kernel.record.observer import ObservedRun
from jupyter_distrib.kernel.record.over_time import OverTime
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.kernel.record.timeline import FEWEST_S
from jupyter_distrib.kernel.views import timeline
from jupyter_distrib.system import record_file
from jupyter_distrib.system.formatting import clipped, rank_list
from jupyter_distrib.system.record_file import ANY_NUMBER, DamagedFile
from jupyter_distrib.wire import messages as m

ROWS = 2000
"""Number of reports to save, of all ranks together, evenly spaced over the run."""
VALUES = 400_000
"""Number of values to save, of all metrics together."""
SOURCE_CHARACTERS = 100_000
ERROR_CHARACTERS = 500


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class SavedRun:
    """One run that has ended."""

    number: int
    """Its number among this user's saved runs."""
    run: str
    label: str
    notebook: str
    project: str = ""
    """Folder of the project's settings file; empty without one."""
    began_at_s: float
    """Start time in seconds since the epoch."""
    elapsed_s: float
    state: str
    error: str = ""
    """The first failure, in one line."""
    facts: dict[str, str] = field(default_factory=dict)
    """Strategy, pool, ranks, the given options as `option.NAME`, the arguments of a function or the values of a
    sweep as `argument.NAME`, versions as `version.NAME`."""
    last: dict[str, float] = field(default_factory=dict, metadata=ANY_NUMBER)
    """The last value of each metric, on the first rank that reported it."""
    not_finite: dict[str, str] = field(default_factory=dict)
    """The metrics that were nan or infinite: `nan from step 31 on rank 3`."""
    shares: dict[str, float] = field(default_factory=dict)
    """Mean share of each part in the training time; empty without training."""
    sentence: str = ""
    """The sentence on the shares."""
    peak_rss_bytes: int = 0
    peak_gpu_memory_bytes: int | None = None
    peak_tensor_bytes: int | None = None
    """The most memory that tensors had on one GPU; None if unknown, or without GPUs."""
    predicted_bytes: int | None = None
    """The same as predicted by a dry run of the cell; None without one."""
    source: str = ""
    """The cell, as the ranks executed it."""
    notes: list[str] = field(default_factory=list)
    """The notes about the run."""
    logs: str = ""
    """Folder of its logs; empty if unknown. They are removed before long."""
    path: str = ""
    """Path of the file, to read the reported numbers."""

    @property
    def deviation(self) -> float | None:
        """The fraction by which the real peak exceeded that of the dry run (0.02 is 2%); None if either is unknown."""
        if not self.predicted_bytes or not self.peak_tensor_bytes:
            return None
        return self.peak_tensor_bytes / self.predicted_bytes - 1

    @property
    def metrics(self) -> Metrics:
        """The reported numbers, as `run.metrics`: rows, points by name, a `pandas.DataFrame` or a CSV file. Raises
        `OSError` or `DamagedFile`."""
        return metrics_from(record_file.record_of(SavedMetrics, self._reports()))

    @property
    def over_time(self) -> OverTime | None:
        """The course of each rank over the run; None if it was not saved. Raises `OSError` or `DamagedFile`."""
        content = self._reports()
        if not isinstance(content, dict) or content.get("over_time") is None:
            return None
        found = record_file.record_of(OverTime, content["over_time"])
        if not found.is_whole:
            raise DamagedFile("it has no text for each rank")
        return found

    @property
    def traceback(self) -> list[str]:
        """The lines of the traceback of a failed run; empty if none was saved. Raises `OSError` or `DamagedFile`."""
        content = self._reports()
        lines = content.get("traceback", []) if isinstance(content, dict) else None
        if not isinstance(lines, list) or not all(isinstance(each, str) for each in lines):
            raise DamagedFile("its traceback is not lines of text")
        return lines

    def _reports(self) -> Any:
        """Return the second line of the file. Raises `OSError` or `DamagedFile`."""
        _, _, line = record_file.text_of(self.path).partition("\n")
        return record_file.json_of(line)

    def summary(self) -> dict[str, Any]:
        """Return everything except number and path, as JSON values."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name not in ("number", "path")}


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedMetrics:
    """The reported numbers of a run in its file."""

    columns: list[str]
    rows: list[list[float | None]] = field(metadata=ANY_NUMBER)


def of(run: ObservedRun, record: RunRecord, notebook: str, project: str = "") -> SavedRun:
    """Return the saved form of a run that has ended, not numbered yet."""
    state = _state(record)
    cause = failures.cause(record) if state != "done" else None
    has_trained = any(rank.times is not None for rank in record.ranks.values())
    shares = Shares.of(record) if has_trained else None
    meaningful = shares if shares is not None and shares.is_meaningful else None
    last: dict[str, float] = {}
    for rank in record.ranks.values():
        last = {**rank.metrics, **last}
    return SavedRun(
        number=0,
        run=run.id,
        label=run.label,
        notebook=notebook,
        project=project,
        began_at_s=run.began_at_s,
        elapsed_s=record.elapsed_s,
        state=state,
        error="" if cause is None else failures.first_trouble(record, cause, ERROR_CHARACTERS),
        facts=run_facts.setting(run) | {f"argument.{name}": text for name, text in run_facts.arguments(run).items()},
        last=last,
        not_finite=phrases_on_not_finite(record),
        shares=dict(meaningful.mean()) if meaningful else {},
        sentence=meaningful.sentence if meaningful else "",
        peak_rss_bytes=record.peak_rss_bytes,
        peak_gpu_memory_bytes=record.peak_gpu_memory_bytes,
        peak_tensor_bytes=record.peak_tensor_bytes,
        predicted_bytes=run.predicted_bytes if run.gpus else None,
        source=clipped(run.source, SOURCE_CHARACTERS).strip("\n"),
        notes=notes_of(record),
        logs=record.log_directory,
    )


def notes_of(record: RunRecord) -> list[str]:
    """Return the notes about a run."""
    notes: list[tuple[list[int], str]] = [
        ([] if note.rank is None else [note.rank], note.text) for note in record.notes
    ]
    notes += [(ranks, text) for text, ranks in record.not_finite.items()]
    texts = [f"{rank_list(ranks)}: {text}" if ranks else text for ranks, text in notes]
    return [clipped(text, ERROR_CHARACTERS) for text in filter(None, [record.remark, *texts])]


def phrases_on_not_finite(record: RunRecord, *, only_now: bool = False) -> dict[str, str]:
    """Return a phrase for each metric that was nan or infinite; with `only_now` for each that still is."""
    ranks = record.ranks.values()
    odd: dict[str, dict[int, NotFinite]] = {}
    for rank in ranks:
        for name, each in rank.not_finite.items():
            if each.is_now or not only_now:
                odd.setdefault(name, {})[rank.rank] = each
    return {name: not_finite.of_ranks(each, sum(name in rank.metrics for rank in ranks)) for name, each in odd.items()}


def _state(record: RunRecord) -> str:
    states = {rank.state for rank in record.ranks.values()}
    worst = next((state for state in ("lost", "failed", "interrupted") if state in states), "")
    return worst or ("done" if record.ok else "refused")


def read(path: Path) -> SavedRun:
    """Read a saved run. Raises `OSError` or `DamagedFile` for a file that is gone or damaged."""
    summary, _, _ = record_file.text_of(path).partition("\n")
    content = record_file.json_of(summary)
    if not isinstance(content, dict):
        raise DamagedFile("it holds no record")
    return record_file.record_of(SavedRun, {**content, "number": int(path.name[:8]), "path": str(path)})


def metrics_to(record: RunRecord) -> dict[str, Any]:
    """Return the reported numbers as JSON values, thinned, what the ranks did over time, and the traceback."""
    has_reported = any(rank.metrics for rank in record.ranks.values())
    metrics = Metrics.of(record) if has_reported else None
    columns = [*OWN_COLUMNS, *(metrics.names if metrics else ())]
    rows = defaultdict(list)
    for row in metrics or ():
        rows[row["rank"]].append([row[name] for name in columns])
    most = max(2, min(ROWS, VALUES // len(columns)) // max(1, len(rows)))
    course = timeline.ranks_over_time(record) if record.elapsed_s >= FEWEST_S else None
    return {
        "columns": columns,
        "rows": [row for each in rows.values() for row in thinned(each, most)],
        "over_time": None if course is None else m.fields_of(course),
        "traceback": [] if record.ok else failures.traceback_of(record),
    }


def thinned(rows: list[Any], most: int) -> list[Any]:
    """Return about `most` rows, evenly spaced, the last one among them."""
    if len(rows) <= most:
        return rows
    return [*rows[:: -(-len(rows) // most)][:-1], rows[-1]]


def metrics_from(saved: SavedMetrics) -> Metrics:
    """Return the reported numbers. Raises `DamagedFile`."""
    columns, own = saved.columns, len(OWN_COLUMNS)
    if tuple(columns[:own]) != OWN_COLUMNS:
        raise DamagedFile("it has other columns")
    for row in saved.rows:
        if len(row) != len(columns) or not all(isinstance(each, int) for each in row[: own - 1]):
            raise DamagedFile("a row has other columns")
    return Metrics(tuple(columns[own:]), tuple(dict(zip(columns, row, strict=True)) for row in saved.rows))
