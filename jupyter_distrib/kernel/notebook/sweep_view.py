"""The view of a sweep under its cell: a widget while it goes on, in JupyterLab and Notebook 7, and a table that stays.
In the thread that executes the cell."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from IPython.display import display

from jupyter_distrib.kernel.notebook.live_view import WIDGET_AFTER_S, route
from jupyter_distrib.kernel.notebook.runs_view import RunsView
from jupyter_distrib.kernel.sidebar import bridge
from jupyter_distrib.kernel.views.run_table import RunRow
from jupyter_distrib.system import interrupts

if TYPE_CHECKING:
    from jupyter_distrib.kernel.notebook.sweep_model import SweepWidget

EVERY_S = 0.5
"""Minimum seconds between two states that are sent to the widget."""


_last: SweepWidget | None = None
"""The widget of the last sweep. It is closed when another one is opened: a page that is still loading a widget reports
an error if that is closed."""


class SweepView(RunsView):
    """The view of one sweep.

    Args:
        bundle: Returns text and HTML of the table as it is now.
        rows: Returns its rows.
        ended: Returns whether all runs have ended.
    """

    def __init__(
        self, bundle: Callable[[], dict[str, str]], rows: Callable[[], Sequence[RunRow]], ended: Callable[[], bool]
    ) -> None:
        super().__init__(bundle)
        self._rows, self._has_ended = rows, ended
        self._widget: SweepWidget | None = None
        self._has_widget = route() == "widget"
        self._began_s, self._drawn_s = time.monotonic(), float("-inf")

    def wait_for_news(self) -> None:
        super().wait_for_news()
        if self._widget is not None and (left_s := self._drawn_s + EVERY_S - time.monotonic()) > 0:
            threading.Event().wait(left_s)

    def draw(self) -> None:
        if self._has_widget and not self._has_ended():
            if time.monotonic() - self._began_s < WIDGET_AFTER_S:
                return None  # it would only flash up
            try:
                return self._draw_widget()
            except Exception:  # noqa: BLE001 - no view may end its runs, and the library of widgets may be broken
                self._has_widget = False
        self._widget = None
        super().draw()
        return None

    def _draw_widget(self) -> None:
        with interrupts.WholeImports():
            from jupyter_distrib.kernel.notebook.sweep_model import SweepWidget, state_of

        self._drawn_s = time.monotonic()
        if self._widget is not None:
            return self._widget.push(state_of(self._rows()))
        global _last
        if _last is not None:
            _last.close()
        self._widget = _last = SweepWidget(_handle_request, state=state_of(self._rows()))
        model: dict[str, Any] = {"version_major": 2, "version_minor": 0, "model_id": self._widget.model_id}
        bundle = {"application/vnd.jupyter.widget-view+json": model, **self._bundle()}
        self._handle = display(bundle, raw=True, display_id=True)  # type: ignore[no-untyped-call]  # no types here


def _handle_request(request: dict[str, Any]) -> None:
    """Stop a run, as the browser asks where no sidebar takes the request."""
    if request.get("op") == "stop":
        bridge.handle({"op": "stop", "run": request.get("run"), "force": False})
