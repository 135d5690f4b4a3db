"""The view of several runs under one cell: a table with a line for each, redrawn in place.

The runs of a sweep are drawn by the thread that waits for them, submitted ones by a thread that lives as long as they
do. In a terminal or a console, a line is printed for each run when it ends.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from IPython.core.getipython import get_ipython
from IPython.display import display

from jupyter_distrib.kernel.notebook.live_view import DRAW_EVERY_S, TICK_S, RedrawSignal, route
from jupyter_distrib.kernel.record.observer import Observer
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.kernel.session.runs.observers import EndObserver
from jupyter_distrib.kernel.session.runs.run import Run
from jupyter_distrib.kernel.sidebar import cell_outputs
from jupyter_distrib.kernel.views import run_table
from jupyter_distrib.kernel.views.drawing import Drawing
from jupyter_distrib.kernel.views.run_table import RunRow
from jupyter_distrib.wire import messages as m


def row_of(run: Run, swept: dict[str, str] | None = None) -> RunRow:
    """Return the line of a run."""
    state = f"{run.state}, place {run.place}" if run.place else run.state
    return RunRow(
        run=run.id, label=run.record.label, state=state, elapsed_s=run.elapsed_s, record=run.record, swept=swept or {}
    )


def lines_only() -> bool:
    """Return whether the front end shows lines of text only."""
    return route() in ("lines", "terminal")


class RunsView(Observer):
    """One view of several runs. Made in the thread that executes the cell.

    Args:
        bundle: Returns text and HTML of the table as it is now.
    """

    def __init__(self, bundle: Callable[[], dict[str, str]]) -> None:
        self._bundle = bundle
        self._redraw = RedrawSignal()
        self._handle: Any = None
        self._last: dict[str, str] = {}
        self._lines = lines_only()
        self._printed: set[str] = set()

    def follow(self, run: Run) -> None:
        """Redraw the view when this run changes."""
        run.observers.add(self)
        run.observers.add(EndObserver(lambda: self._ended(run)))

    def observe(self, event: m.RunEvent, record: RunRecord) -> None:
        self._redraw.notify()

    def wait_for_news(self) -> None:
        """Wait until there is something new to draw, or a second has passed."""
        self._redraw.wait(TICK_S)

    def draw(self) -> None:
        if self._lines or (bundle := self._bundle()) == self._last:
            return
        self._last = bundle
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)  # type: ignore[no-untyped-call]  # no types here
        else:
            self._handle.update(bundle, raw=True)

    def put_picture(self, drawing: Drawing | None) -> None:
        """Show a picture below, as an output of its own, which exports keep."""
        if drawing is None or self._lines:
            return
        width, height = drawing.size
        about = {
            "image/png": {"width": width, "height": height, "alt": drawing.alt},
            "jupyter_distrib": {"settled": True},
        }
        bundle = {"image/png": drawing.as_png(), "text/plain": drawing.alt}
        display(bundle, raw=True, metadata=about)  # type: ignore[no-untyped-call]  # no types here

    def _ended(self, run: Run) -> None:
        if self._lines and run.id not in self._printed:
            self._printed.add(run.id)
            row = row_of(run)
            parts = (f"[{run.id.rpartition('-')[2]}]", row.label, row.state, *row.status()[1:])
            sys.stdout.write("  ".join(filter(None, parts)) + "\n")  # in one piece, since another thread may print
            sys.stdout.flush()


class SubmittedView:
    """The view of the runs submitted by one cell."""

    def __init__(self, place: cell_outputs.CellPlace) -> None:
        self.place = place
        self._runs: list[Run] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._view = RunsView(self._bundle)

    def add(self, run: Run) -> None:
        self._runs.append(run)
        self._view.follow(run)
        if len(self._runs) == 1:
            self._view.draw()
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._follow, name="jupyter_distrib-submitted", daemon=True)
                self._thread.start()

    def _bundle(self) -> dict[str, str]:
        return bundle_of(run_table.of_runs([row_of(run) for run in self._runs]))

    def _follow(self) -> None:
        while True:
            self._view.wait_for_news()
            with self._lock:
                if all(run.done() for run in self._runs):
                    self._thread = None
                    break
            self._view.draw()
            threading.Event().wait(DRAW_EVERY_S)  # so many at once are one drawing
        self._view.draw()


def bundle_of(table: Any, more_html: str = "") -> dict[str, str]:
    """Return a table as text and as HTML; the HTML includes `more_html`."""
    return {"text/plain": table.as_text(), "text/html": f"<div>{table.as_html()}{more_html}</div>"}


_last: SubmittedView | None = None


def show(runs: Sequence[Run]) -> None:
    """Show submitted runs under the current cell, in one view with earlier ones."""
    global _last
    place = cell_outputs.place(get_ipython())
    if _last is None or _last.place != place:
        _last = SubmittedView(place)
    for run in runs:
        run.group = run.group or f"Runs of Cell In[{place.count}]"
        _last.add(run)
