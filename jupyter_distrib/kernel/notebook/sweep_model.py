"""The widget that shows a sweep in the browser, an anywidget, and its state. Kernel side; imported when a sweep begins
in JupyterLab or Notebook 7."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any

import anywidget
import traitlets

from jupyter_distrib.kernel.notebook import widget_model
from jupyter_distrib.kernel.views import page_code, run_table, state
from jupyter_distrib.kernel.views.run_table import RunRow

_ENDED = ("done", "failed", "lost", "refused", "interrupted")


class SweepWidget(anywidget.AnyWidget):
    """The widget of one sweep."""

    layout = traitlets.Any(None).tag(sync=True)
    state = traitlets.Dict().tag(sync=True)
    _esm = page_code.script(page_code.SWEEP)
    _css = page_code.style(page_code.SWEEP)

    def __init__(self, on_request: Callable[[dict[str, Any]], object], **traits: Any) -> None:
        super().__init__(**traits)
        self.on_msg(lambda _, content, buffers: on_request(content))

    def push(self, new: dict[str, Any]) -> None:
        """Send this state to the browser if it has changed."""
        self.state = new
        widget_model.answer_during_cells(self)


def state_of(rows: Sequence[RunRow]) -> dict[str, Any]:
    """Return the state of a sweep as JSON values; each row, the best first, has its place in the sweep."""
    metrics = list(dict.fromkeys(name for row in rows for name in row.metrics))
    places = {row.run: place for place, row in enumerate(rows)}
    points = max(20, state.POINTS // max(1, len(rows)))
    return {
        "rows": [_row(row, places[row.run]) for row in run_table.in_order(rows)],
        "labels": [_label(row) for row in rows],
        "names": list(rows[0].swept) if rows else [],
        "metrics": metrics,
        "metric": run_table.metric_of(rows),
        "ranks": [
            {"rank": place, "state": row.state, "columns": _columns(row, points)} for place, row in enumerate(rows)
        ],
    }


def _row(row: RunRow, place: int) -> dict[str, Any]:
    progress, _, reason = row.status()
    return {
        "run": row.run,
        "place": place,
        "label": _label(row),
        "swept": dict(row.swept),
        "numbers": {name: value if isfinite(value) else None for name, value in row.metrics.items()},
        "texts": {name: f"{value:.4g}" for name, value in row.metrics.items()},
        "state": row.state,
        "progress": progress or row.time,
        "reason": reason if row.state in _ENDED and row.state != "done" else "",
        "ended": row.state in _ENDED,
        "waits": row.state.startswith("queued"),
    }


def _label(row: RunRow) -> str:
    return ", ".join(f"{name}={value}" for name, value in row.swept.items())


def _columns(row: RunRow, points: int) -> dict[str, Any] | None:
    """Return the numbers of the first rank that has reported some."""
    rank = next((rank for rank in row.record.ranks.values() if rank.history), None)
    return None if rank is None else state.columns(rank, points, state.origin(row.record))
