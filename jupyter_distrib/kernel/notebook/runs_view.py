"""The view of several runs under one cell: the runs of a sweep, or those submitted by the cell.

It is a widget while they go on, in JupyterLab and Notebook 7, and then a table with charts.

The runs of a sweep are drawn by the thread that waits for them, submitted ones by a thread that lives as long as they
do. In a terminal or a console, a line is printed for each run when it ends.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from IPython.core.getipython import get_ipython

from jupyter_distrib.kernel.notebook.live_view import (
    DRAW_EVERY_S,
    TICK_S,
    WIDGET_AFTER_S,
    CellDisplay,
    RedrawSignal,
    route,
)
from jupyter_distrib.kernel.record.observer import Observer
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.kernel.session.runs.observers import EndObserver
from jupyter_distrib.kernel.session.runs.run import Run
from jupyter_distrib.kernel.sidebar import bridge, cell_outputs
from jupyter_distrib.kernel.views import run_table
from jupyter_distrib.kernel.views.drawing import Drawing
from jupyter_distrib.kernel.views.run_table import RunRow
from jupyter_distrib.system import formatting, interrupts, terminal_line
from jupyter_distrib.wire import messages as m

if TYPE_CHECKING:
    from jupyter_distrib.kernel.notebook.sweep_model import SweepWidget

EVERY_S = 0.5
"""Minimum seconds between two states that are sent to the widget."""
CHART_EVERY_S = 2.0
"""Minimum seconds between two charts of the same runs while they go on: one takes 50 ms."""


_ended: list[SweepWidget] = []
"""The widgets of views that have ended. They are closed when another one is opened: a page that is still loading a
widget reports an error if that is closed."""


def texts(values: Mapping[str, object]) -> dict[str, str]:
    """Return the values of a configuration as short texts of one line."""
    return {name: formatting.short(" ".join(repr(value).split())) for name, value in values.items()}


def row_of(run: Run, swept: Mapping[str, str] | None = None) -> RunRow:
    """Return the line of a run."""
    state = f"{run.state}, place {run.place}" if run.place else run.state
    return RunRow(
        run=run.id, label=run.record.label, state=state, elapsed_s=run.elapsed_s, record=run.record, swept=swept or {}
    )


class RunsView(Observer):
    """One view of several runs. Made in the thread that executes the cell.

    Args:
        runs: Returns the runs; there may be more later.
        rows: Returns their rows.
        place: The execution of the cell under which it is.
        waits: Whether the cell waits for the runs.
    """

    def __init__(
        self,
        runs: Callable[[], Sequence[Run]],
        rows: Callable[[], Sequence[RunRow]],
        place: cell_outputs.CellPlace,
        *,
        waits: bool,
    ) -> None:
        self._runs, self._rows, self._place, self._waits = runs, rows, place, waits
        self._redraw = RedrawSignal()
        self._display: CellDisplay | None = None
        self._widget: SweepWidget | None = None
        way = route()
        self._lines, self._has_widget = way in ("lines", "terminal"), way == "widget"
        self._began_s, self._sent_s = time.monotonic(), float("-inf")
        self._chart, self._drawn_s = "", float("-inf")
        self._is_settled = False
        """Whether it shows the end of all runs that there are."""
        self._printed: set[str] = set()

    def follow(self, run: Run) -> None:
        """Redraw the view when this run changes."""
        run.observers.add(self)
        run.observers.add(EndObserver(lambda: self._run_ended(run)))

    @property
    def has_ended(self) -> bool:
        return all(run.done() for run in self._runs())

    def observe(self, event: m.RunEvent, record: RunRecord) -> None:
        self._redraw.notify()

    def wait_for_news(self) -> None:
        """Wait until there is something new to draw, or a second has passed."""
        self._redraw.wait(TICK_S)
        if self._widget is not None and (left_s := self._sent_s + EVERY_S - time.monotonic()) > 0:
            threading.Event().wait(left_s)

    def draw(self) -> None:
        if self._lines:
            return
        if self.has_ended:
            return None if self._is_settled else self._end()
        self._is_settled = False
        if not self._has_widget:
            return self._put(self._bundle(), settled=False)
        if time.monotonic() - self._began_s < WIDGET_AFTER_S:  # it would only flash up
            return None if self._waits else self._put(self._bundle(), settled=False)
        try:
            return self._draw_widget()
        except Exception:  # noqa: BLE001 - no view may end its runs, and the library of widgets may be broken
            self._has_widget = False
            return self._put(self._bundle(), settled=False)

    def _draw_widget(self) -> None:
        with interrupts.WholeImports():
            from jupyter_distrib.kernel.notebook.sweep_model import SweepWidget, state_of

        self._sent_s = time.monotonic()
        if self._widget is not None:
            return self._widget.push(state_of(self._rows()))
        while _ended:
            _ended.pop().close()
        widget = self._widget = SweepWidget(_handle_request, state=state_of(self._rows()))
        model: dict[str, Any] = {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}
        self._put({"application/vnd.jupyter.widget-view+json": model, **self._bundle()}, settled=False)
        return bridge.show(
            cell_outputs.Shown(
                view=self._name,
                runs=lambda: [run.id for run in self._runs()],
                place=self._place,
                model=widget.model_id,
                state=widget.get_state,
                detached=not self._waits,
            )
        )

    def _end(self) -> None:
        """Show what stays, with the charts in an output of their own if the cell can still have one."""
        self._is_settled = True
        rows = self._rows()
        drawing = run_table.chart_of_sweep(rows)
        inside = "" if self._waits or drawing is None else drawing.as_html()
        self._put(_bundle_of(rows, inside), settled=True)
        if self._display is not None:
            model = self._widget.model_id if self._widget is not None else ""
            bridge.keep_final_view(self._display, model_id=model, place=self._place, detached=not self._waits)
        if self._waits and drawing is not None:
            self._put_picture(drawing)
        if self._widget is not None:
            _ended.append(self._widget)
            self._widget = None

    def _put_picture(self, drawing: Drawing) -> None:
        """Show a picture below, as an output of its own, which exports keep."""
        own = CellDisplay(f"{self._name}-chart")
        width, height = drawing.size
        about = {"image/png": {"width": width, "height": height, "alt": drawing.alt}}
        own.put({"image/png": drawing.as_png(), "text/plain": drawing.alt}, settled=True, more=about)
        bridge.keep_final_view(own, model_id="", place=self._place, detached=False)

    def _put(self, bundle: dict[str, Any], *, settled: bool) -> None:
        if self._display is None:
            self._display = CellDisplay(self._name)
        self._display.put(bundle, settled=settled)

    @property
    def _name(self) -> str:
        return f"{self._runs()[0].id}-runs"

    def _bundle(self) -> dict[str, str]:
        """Return text and HTML while the runs go on."""
        rows = self._rows()
        if time.monotonic() - self._drawn_s >= CHART_EVERY_S:
            drawing = run_table.chart_of_sweep(rows)
            self._drawn_s, self._chart = time.monotonic(), drawing.as_html() if drawing else ""
        return _bundle_of(rows, self._chart)

    def _run_ended(self, run: Run) -> None:
        if self._lines and run.id not in self._printed:
            self._printed.add(run.id)
            row = row_of(run)
            parts = (f"[{run.id.rpartition('-')[2]}]", row.label, row.state, *row.status()[1:])
            line = terminal_line.encodable("  ".join(filter(None, parts)), sys.stdout)
            sys.stdout.write(f"{line}\n")  # in one piece, since another thread may print
            sys.stdout.flush()


class SubmittedView:
    """The view of the runs submitted by one cell."""

    def __init__(self, place: cell_outputs.CellPlace) -> None:
        self.place = place
        self._runs: list[Run] = []
        self._given: list[Mapping[str, str]] = []
        """The numbers and texts among the arguments of each run."""
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._view = RunsView(lambda: tuple(self._runs), self._rows, place, waits=False)

    def add(self, run: Run, given: Mapping[str, str]) -> None:
        self._given.append(given)
        self._runs.append(run)
        self._view.follow(run)
        if len(self._runs) == 1:
            self._view.draw()
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._follow, name="jupyter_distrib-submitted", daemon=True)
                self._thread.start()

    def _rows(self) -> list[RunRow]:
        runs = tuple(self._runs)
        texts = distinctions([run.record.label for run in runs], self._given)
        return [row_of(run, each) for run, each in zip(runs, texts, strict=False)]

    def _follow(self) -> None:
        while True:
            self._view.wait_for_news()
            with self._lock:
                if self._view.has_ended:
                    self._thread = None
                    break
            self._view.draw()
            threading.Event().wait(DRAW_EVERY_S)  # many changes in this time are drawn once
        self._view.draw()


def distinctions(calls: Sequence[str], given: Sequence[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """Return what distinguishes each of several calls: the arguments that differ between them, or else the call
    itself."""
    given = given[: len(calls)]
    names = [name for name in given[0] if len({each.get(name) for each in given}) > 1] if given else []
    found = [{name: each[name] for name in names if name in each} for each in given]
    distinct = {tuple(each.items()) for each in found}
    if names and len(distinct) == len(set(calls)) and all(each.keys() == set(names) for each in found):
        return [*found]
    return [{"call": call} for call in calls]


def _bundle_of(rows: Sequence[RunRow], more_html: str) -> dict[str, str]:
    """Return the table as text and as HTML; the HTML includes `more_html`."""
    table = run_table.of_sweep(rows)
    return {"text/plain": table.as_text(), "text/html": f"<div>{table.as_html()}{more_html}</div>"}


def _handle_request(request: dict[str, Any]) -> None:
    """Stop a run, as the browser asks where no sidebar takes the request."""
    if request.get("op") == "stop":
        bridge.handle({"op": "stop", "run": request.get("run"), "force": False})


_last: SubmittedView | None = None


def show(runs: Sequence[Run], given: Sequence[Mapping[str, str]] = ()) -> None:
    """Show submitted runs under the current cell, in one view with earlier ones.

    Args:
        runs: The runs.
        given: The values with which each was called.
    """
    global _last
    place = cell_outputs.place(get_ipython())
    if _last is None or _last.place != place:
        _last = SubmittedView(place)
    for run, values in zip(runs, given or [{}] * len(runs), strict=True):
        run.group = run.group or f"Runs of Cell In[{place.count}]"
        _last.add(run, values)
