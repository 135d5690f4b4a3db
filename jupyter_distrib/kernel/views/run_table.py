"""Tables and charts of several runs, a line for each: those of a sweep, and those submitted by a cell. Kernel side;
pure functions.

    lr     loss  state            progress    time
    0.01   0.24  running          epoch 3/10  3 s
    0.001  0.31  done                         12 s
    0.1          queued, place 1
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, isnan, nan

from jupyter_distrib.kernel.analysis.best_value import direction
from jupyter_distrib.kernel.record.not_finite import NotFinite
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.kernel.views import chart, parallel
from jupyter_distrib.kernel.views import text as text_view
from jupyter_distrib.kernel.views.drawing import Drawing, together
from jupyter_distrib.kernel.views.table import Row, TextTable
from jupyter_distrib.system.formatting import duration


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """One run of a table."""

    run: str
    label: str
    state: str
    """The state, with the place in the queue."""
    elapsed_s: float
    record: RunRecord
    swept: Mapping[str, str] = field(default_factory=dict)
    """The values that tell this run from the others, as text, by name."""

    @property
    def metrics(self) -> dict[str, float]:
        """The last value of each metric, on the first rank that reported it."""
        found: dict[str, float] = {}
        for rank in self.record.ranks.values():
            found = {**rank.metrics, **found}
        return found

    @property
    def time(self) -> str:
        begun = any(rank.started_at_s is not None for rank in self.record.ranks.values())
        return duration(self.elapsed_s) if begun else ""

    def status(self) -> tuple[str, str, str]:
        """Return the progress of the slowest ranks, their metrics, and the reason for a failure."""
        rows = text_view.statuses(self.record, max(self.elapsed_s, text_view.QUIET_S))
        return (rows[0][2], rows[0][3], rows[0][4]) if rows else ("", "", "")


def of_sweep(rows: Sequence[RunRow]) -> TextTable:
    """Return the table of a sweep: the reported values of each run, the best run first."""
    names = list(dict.fromkeys(name for row in rows for name in row.metrics))
    swept = list(rows[0].swept) if rows else []
    head = (*swept, *names, "state", "progress", "time", "")
    lines: list[Row] = []
    for row in in_order(rows):
        progress, _, detail = row.status()
        numbers = [f"{row.metrics[name]:.4g}" if name in row.metrics else "" for name in names]
        trouble = detail if row.state in ("failed", "lost", "refused", "interrupted") else ""
        reason = row.record.remark if row.state == "refused" else trouble
        lines.append((*row.swept.values(), *numbers, row.state, progress, row.time, reason))
    return TextTable(head=head, rows=lines).without_empty("progress", "time", "")


def in_order(rows: Sequence[RunRow]) -> list[RunRow]:
    """Return the runs sorted by the metric that compares them, the best first; runs without it are last, in the order
    of submission."""
    metric = metric_of(rows)
    sign = -1.0 if direction(metric) > 0 else 1.0

    def key(row: RunRow) -> float:
        value = row.metrics.get(metric, inf)
        return inf if isnan(value) else sign * value

    return sorted(rows, key=key)


def chart_of_sweep(rows: Sequence[RunRow]) -> Drawing | None:
    """Return the charts of the values reported by the runs of a sweep, and their parallel coordinates; the best run's
    line is highlighted."""
    ordered = in_order(rows)
    names = list(dict.fromkeys(name for row in ordered for name in row.metrics))
    most = max(20, chart.POINTS // max(1, len(rows)))

    def lines(name: str) -> list[chart.Line]:
        found = []
        for number, row in reversed(list(enumerate(ordered))):
            rank = next((rank for rank in row.record.ranks.values() if name in rank.metrics), None)
            if rank is not None and (points := list(chart.points_of(rank, name, most))):
                found.append((number, points))
        return found

    def name_of(number: int) -> str:
        return ", ".join(f"{name}={value}" for name, value in ordered[number].swept.items())

    turned: dict[str, dict[int, NotFinite]] = {}
    for number, row in enumerate(ordered):
        for rank in reversed(row.record.ranks.values()):
            for name, odd in rank.not_finite.items():
                turned.setdefault(name, {})[number] = odd
    charts = chart.drawn({name: lines(name) for name in names}, name_of, turned)
    width = charts.width if charts is not None else chart.WIDTH
    return together([charts, _parallel(ordered, metric_of(rows), width)])


def metric_of(rows: Sequence[RunRow]) -> str:
    """Return the metric by which the runs are compared: the first that is to be small or large, else the first; empty
    if there is none."""
    names = list(dict.fromkeys(name for row in rows for name in row.metrics))
    return next((name for name in names if direction(name)), next(iter(names), ""))


def _parallel(ordered: Sequence[RunRow], metric: str, width: int) -> Drawing | None:
    if not metric:
        return None
    names = list(ordered[0].swept)
    rows = [[*(row.swept.get(name) for name in names), row.metrics.get(metric)] for row in ordered]
    first = ", ".join(f"{name}={value}" for name, value in ordered[0].swept.items())
    has_best = isfinite(ordered[0].metrics.get(metric, nan))
    best = f"the {'best' if direction(metric) else 'smallest'} is {first}" if has_best else ""
    return parallel.drawn([*names, metric], rows, best, width)
