"""Runs as lines of JSON, for programs: `%distributed_status --json`, `%distributed_logs --json`, the shell's command.

One line for each run. The keys are documented in docs/headless.md: more may be added, but none is removed. Kernel
side.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Protocol

from jupyter_distrib.kernel.analysis.failures import cause, in_brief
from jupyter_distrib.kernel.analysis.lost_peers import is_consequence
from jupyter_distrib.kernel.analysis.traceback_text import innermost
from jupyter_distrib.kernel.record.rank_record import RankRecord
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.kernel.record.terminal_stream import without_codes
from jupyter_distrib.kernel.session.runs.results import short_text


class Clock(Protocol):
    """The part of a run's clock that these lines need."""

    @property
    def began_at_s(self) -> float: ...


class ReportedRun(Protocol):
    """The part of a run that these lines need."""

    record: RunRecord
    detached: bool

    @property
    def clock(self) -> Clock: ...

    @property
    def id(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def place(self) -> int: ...
    @property
    def pool(self) -> str: ...
    @property
    def elapsed_s(self) -> float: ...
    @property
    def refusal(self) -> BaseException | None: ...
    def seen_values(self) -> dict[int, Any]: ...
    def log_file(self, rank: int) -> Path: ...
    def logs(self, rank: int | None = None) -> str: ...


def status_line(run: ReportedRun) -> str:
    """Return the state of a run, with its values and errors, in one line."""
    return line(status_of(run))


def logs_line(run: ReportedRun, rank: int | None) -> str:
    """Return the state of a run with the complete output of one rank, or of all of them, in one line."""
    ranks = list(run.record.ranks) if rank is None else [rank]
    logs = {str(each): without_codes(run.logs(each)) for each in ranks}
    return line({"run": run.id, "state": run.state, "logs": logs})


def status_of(run: ReportedRun) -> dict[str, Any]:
    """Return the state of a run as JSON values."""
    record = run.record
    refusal = run.refusal
    return {
        "run": run.id,
        "label": record.label,
        "state": run.state,
        "place": run.place,
        "pool": run.pool,
        "strategy": record.strategy,
        "ranks": list(record.ranks),
        "world_size": record.world_size,
        "gpus": record.gpus,
        "detached": run.detached,
        "began_at_s": run.clock.began_at_s,
        "elapsed_s": round(run.elapsed_s, 3),
        "values": {str(rank): short_text(value) for rank, value in run.seen_values().items()},
        "errors": [_error(record, rank) for rank in record.ranks.values() if in_brief(record, rank)],
        "refusal": None if refusal is None else f"{type(refusal).__name__}: {refusal}",
        "metrics": {str(rank.rank): _numbers(rank) for rank in record.ranks.values() if rank.metrics},
        "progress": {str(rank.rank): _loops(rank) for rank in record.ranks.values() if rank.progress},
        "notes": list(dict.fromkeys(note.text for note in record.notes)),
        "stall": record.stall.text if record.stall is not None else "",
        "files": {str(rank): str(run.log_file(rank)) for rank in record.ranks if run.log_file(rank).exists()},
    }


def _error(record: RunRecord, rank: RankRecord) -> dict[str, Any]:
    failure = rank.failure
    frame = innermost(failure.frames) if failure is not None else None
    return {
        "rank": rank.rank,
        "root": rank.rank == cause(record),
        "consequence": is_consequence(record, rank),
        "type": failure.type_name if failure is not None else "RankLost",
        "message": failure.message if failure is not None else in_brief(record, rank),
        "file": frame.filename if frame is not None else "",
        "line": frame.line if frame is not None else 0,
    }


def _numbers(rank: RankRecord) -> dict[str, float | str]:
    return {name: number(value) for name, value in rank.metrics.items()}


def _loops(rank: RankRecord) -> list[dict[str, Any]]:
    return [{"label": bar.label, "step": bar.step, "total": bar.total} for bar in rank.progress]


def number(value: float) -> float | str:
    """Return a number, as a text if JSON does not have it: `"nan"`."""
    return value if math.isfinite(value) else str(value)


def line(values: dict[str, Any]) -> str:
    """Return values as one line of JSON."""
    return json.dumps(values, ensure_ascii=False)
