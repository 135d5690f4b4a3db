"""The live view of a run in the cell that started it, and the static view that remains at the end. An observer of the
run, which draws in the thread that waits for it.

    JupyterLab, Notebook 7            the widget (`kernel/notebook/widget_model.py`), a message every `WIDGET_EVERY_S`
                                      at most
    VS Code, Colab, programs that     HTML and text, redrawn in place; never the widget, since whether one of these
    execute notebooks                 runs it shows only when it has failed to
    other clients that people use     lines as they come, and the end as a display of its own: many of them (Jupyter
                                      console) ignore updates of displays
    a plain terminal                  lines as they come, a line of status now and then, the table of ranks at the end

Nothing appears before there is something to see, and of a cell that ends at once only the end is shown: static HTML and
text (`kernel/views/html.py`, `kernel/views/text.py`) without a widget, which a saved notebook keeps.
"""

from __future__ import annotations

import importlib.util
import queue
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from IPython.core.getipython import get_ipython
from IPython.display import display

from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.kernel.session.runs.run import Run, View
from jupyter_distrib.kernel.sidebar import bridge, cell_outputs
from jupyter_distrib.kernel.views import text as text_view
from jupyter_distrib.system import interrupts, process_environment, terminal_line
from jupyter_distrib.wire import messages as m

if TYPE_CHECKING:  # a cell that shows nothing needs none of them
    from jupyter_distrib.kernel.notebook.widget_model import RunWidget
    from jupyter_distrib.kernel.views.state import StateDelta


DRAW_EVERY_S = 0.25
"""Interval of drawing HTML and text; the first time is at once."""
WIDGET_AFTER_S = 0.3
"""Minimum age of a run for a widget, which would only flash up for a shorter run."""
WIDGET_EVERY_S = 0.2
TICK_S = 1.0
"""Interval, without news, of checking whether the run is worth showing and of updating its clock."""
STATUS_EVERY_S = 5.0
"""Interval of status lines in a terminal while nothing else is printed."""
_QUIET = (m.Started, m.Returned)
"""Events without a visible effect, which do not wake the waiting thread."""
CHOICE = "JUPYTER_DISTRIB_VIEW"
"""The environment variable that forces `widget`, `html` or `lines` on a front end that is mistaken for another."""
COLAB = "COLAB_RELEASE_TAG"
"""The environment variable that identifies a kernel of Google Colab, which updates displays although it names no
cell."""
_NO_WIDGETS = (
    "The run goes on. Its live view is a widget, which this front end does not show; the output comes here at the end. "
    f"{CHOICE}=html in the kernel's environment gives a plain view instead."
)


class RedrawSignal:
    """A signal that wakes the waiting thread to redraw. Set from any other thread; several calls before the thread
    wakes count as one."""

    def __init__(self) -> None:
        self._requests: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._rung = False

    def notify(self) -> None:
        if not self._rung:
            self._rung = True
            self._requests.put(None)

    def wait(self, timeout_s: float) -> None:
        with suppress(queue.Empty):
            interrupts.get(self._requests, timeout_s)
        self._rung = False


class CellDisplay:
    """The display of one run under its cell, which is redrawn in place."""

    def __init__(self, view: str) -> None:
        self.view = view
        """The name by which pages find it: the run's id, with a suffix for further outputs."""
        self.data: dict[str, Any] = {}
        """The bundle that was shown last."""
        self.metadata: dict[str, Any] = {}
        self._handle: Any = None

    @property
    def exists(self) -> bool:
        return self._handle is not None

    def put(self, bundle: dict[str, Any], *, settled: bool, more: dict[str, Any] | None = None) -> None:
        """Replace the shown bundle by this one, unless it is empty or equal; `more` is its metadata."""
        if not bundle:
            return
        metadata = {**cell_outputs.marked(self.view, settled=settled), **(more or {})}
        if (bundle, metadata) == (self.data, self.metadata):
            return
        self.data, self.metadata = bundle, metadata
        if self._handle is None:
            self._handle = display(  # type: ignore[no-untyped-call]  # IPython has no types here
                bundle, metadata=metadata, raw=True, display_id=True
            )
        else:
            self._handle.update(bundle, metadata=metadata, raw=True)


class LiveView(View):
    """The live view of one run. Made in the thread that executes the cell."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._display = CellDisplay(run.id)
        self._redraw = RedrawSignal()
        self._again_s = 0.0
        """The seconds until the next drawing without news."""
        self._next_s = 0.0
        self._changes = -1
        self._streamed = 0
        self._printed_s = time.monotonic()
        """Time of the last printed line."""
        self._widget: RunWidget | None = None
        self._pieces: StateDelta
        """Pieces of the state that the widget has; created with it."""
        self._place = cell_outputs.place(get_ipython())
        self._way = route()
        self._show = self._choose()
        self._chart_inside: bool | None = None
        """Whether the chart is part of the final view; None until that is shown."""

    def _choose(self) -> Callable[[RunRecord, float], object] | None:
        """Return the method that shows this run; None if it is not shown at all."""
        if self._run.link.echoes_output:
            return None
        return {"terminal": self._stream, "lines": self._stream, "widget": self._push, "html": self._draw_html}[
            self._way
        ]

    def open_now(self) -> LiveView:
        """Open the display under the cell now, for a run that another thread shows after the end of the cell."""
        if self._show == self._push:
            self._try(self._open_widget)
        if self._show == self._draw_html:
            self._put(self._bundle(self._run.record, self._run.elapsed_s, shown=True))
        return self

    def observe(self, event: m.RunEvent, record: RunRecord) -> None:
        """Wake the waiting thread if there is something to show; show a note that arrives after the end."""
        if self._chart_inside is not None and isinstance(event, m.Noted):
            self._show_late(event, record, with_chart=self._chart_inside)
        elif not isinstance(event, _QUIET):
            self._redraw.notify()

    def wait_for_news(self) -> None:
        self._redraw.wait(self._again_s)

    def draw(self, record: RunRecord, elapsed_s: float) -> None:
        self._again_s = self._draw_if_due(record, elapsed_s)

    def _draw_if_due(self, record: RunRecord, elapsed_s: float) -> float:
        """Draw the view if it is due. Return the seconds until the next drawing."""
        if self._show is None:
            return TICK_S
        now_s = time.monotonic()
        if record.ended:
            self._end(record, elapsed_s)
        elif now_s < self._next_s:
            return self._next_s - now_s if record.changes != self._changes else TICK_S
        elif self._show == self._push and self._widget is None and elapsed_s < WIDGET_AFTER_S:
            return WIDGET_AFTER_S - elapsed_s
        else:
            self._show(record, elapsed_s)
        self._changes = record.changes
        self._next_s = now_s + self._every_s
        return TICK_S

    @property
    def _every_s(self) -> float:
        return WIDGET_EVERY_S if self._show == self._push else DRAW_EVERY_S

    def _end(self, record: RunRecord, elapsed_s: float) -> None:
        """Show the final view, once, even if the waiting thread calls again."""
        show, self._show, self._chart_inside = self._show, None, not self._can_add_output
        if show == self._stream:
            self._stream(record, elapsed_s)
            return self._end_of_lines(record, elapsed_s)
        # Late notes can be added to a display, but not make one.
        shown = self._display.exists or self._run.observers.unfinished
        self._put(self._bundle(record, elapsed_s, shown=shown))
        if self._display.exists:
            model = self._widget.model_id if self._widget is not None else ""
            self._keep(self._display, model)
            self._put_chart(record)
        if self._widget is not None:
            with suppress(Exception):  # as in `_try`, but for the last time
                self._send()  # pages that draw the view by themselves keep it until the cell ends
                self._widget.close()
            self._widget = None

    def _show_late(self, event: m.Noted, record: RunRecord, *, with_chart: bool) -> None:
        """Add a note to the view of a run that has ended; in the thread that adds the note."""
        if self._way in ("terminal", "lines"):
            _say(f"· {event.text}")
        elif self._display.exists:
            self._put(self._bundle(record, self._run.elapsed_s, shown=True, with_chart=with_chart))
            self._keep(self._display, "")

    # ------------------------------------------------------------------------------------------------ HTML and text

    def _draw_html(self, record: RunRecord, elapsed_s: float) -> None:
        self._put(self._bundle(record, elapsed_s, shown=False))

    def _bundle(
        self, record: RunRecord, elapsed_s: float, *, shown: bool, with_chart: bool | None = None
    ) -> dict[str, str]:
        """Return text and HTML; empty if there is nothing to show and no earlier view (`shown`) to replace."""
        if not shown and not text_view.is_worth_showing(record, elapsed_s):
            return {}
        if with_chart is None:
            with_chart = not self._can_add_output
        pool, output = self._run.pool, text_view.output_lines(record)
        text = text_view.as_text(record, elapsed_s, pool, always=True, output=output)
        html = _as_html(record, elapsed_s, pool, always=True, output=output, with_chart=with_chart)
        return {"text/plain": text, "text/html": html}

    def _put_chart(self, record: RunRecord) -> None:
        """Show the chart as a separate output, so that exports and hosting sites show it too."""
        if not self._can_add_output:
            return
        from jupyter_distrib.kernel.views.html import picture_of

        if drawing := picture_of(record):
            own = CellDisplay(f"{self._run.id}-chart")
            width, height = drawing.size
            about = {"image/png": {"width": width, "height": height, "alt": drawing.alt}}
            own.put({"image/png": drawing.as_png(), "text/plain": drawing.alt}, settled=True, more=about)
            self._keep(own, "")

    def _keep(self, display: CellDisplay, model_id: str) -> None:
        bridge.keep_final_view(display, model_id=model_id, place=self._place, detached=self._run.detached)

    @property
    def _can_add_output(self) -> bool:
        """Return whether the cell can have another output: from another thread, it would appear under another cell."""
        return not self._run.detached and threading.current_thread() is threading.main_thread()

    def _put(self, bundle: dict[str, Any]) -> None:
        self._display.put(bundle, settled=self._run.record.ended)

    # ------------------------------------------------------------------------------------------------ the widget

    def _push(self, record: RunRecord, elapsed_s: float) -> None:
        if self._widget is not None:
            self._try(self._send)
        elif text_view.is_worth_showing(record, elapsed_s):
            self._try(self._open_widget)

    def _try(self, action: Callable[[], object]) -> None:
        """Call `action`; if the widget library is missing or broken, show HTML from now on, since no view may end its
        run."""
        try:
            action()
        except Exception:  # noqa: BLE001 - foreign code, and whatever front ends do to it
            self._widget, self._show = None, self._draw_html

    def _send(self) -> None:
        if self._widget is not None and (changed := self._changed()):
            self._widget.push(changed)

    def _changed(self) -> dict[str, Any]:
        return self._pieces.changed(self._run.record, time.monotonic(), stopping=self._run.stopping)

    def _open_widget(self) -> None:
        with interrupts.WholeImports():
            from jupyter_distrib.kernel.notebook.widget_model import RunWidget
            from jupyter_distrib.kernel.views.state import StateDelta

        self._pieces = StateDelta(self._run.pool)
        self._changed()
        self._widget = RunWidget(self._state, self._handle_request)
        name, state = self._widget.model_id, self._widget.get_state
        run = self._run
        bridge.show(
            cell_outputs.Shown(
                view=run.id,
                runs=lambda: [run.id],
                place=self._place,
                model=name,
                state=state,
                detached=run.detached,
            )
        )
        text = text_view.header(self._run.record, self._run.elapsed_s, self._run.pool)
        html = _as_html(self._run.record, self._run.elapsed_s, self._run.pool, always=True)
        model = {"version_major": 2, "version_minor": 0, "model_id": name}
        self._put(
            {
                "application/vnd.jupyter.widget-view+json": model,
                "text/html": f"{html}<div>{_NO_WIDGETS}</div>",
                "text/plain": f"{text}\n{_NO_WIDGETS}",
            }
        )

    def _state(self) -> dict[str, Any]:
        return {**self._pieces.now, "clock": {"elapsed_s": self._run.elapsed_s}}

    def _handle_request(self, request: dict[str, Any]) -> None:
        """Handle a request of the browser about this run, in the thread that receives it."""
        bridge.handle({**request, "run": self._run.id})

    # ------------------------------------------------------------------------------------------------ a terminal

    def _stream(self, record: RunRecord, elapsed_s: float) -> None:
        """Print lines as they come, or a status line after a while without any; nothing is redrawn in place."""
        lines, self._streamed = text_view.stream_lines(record, self._streamed)
        if not lines and not record.ended and time.monotonic() >= self._printed_s + STATUS_EVERY_S:
            lines = [text_view.status_line(record, elapsed_s, self._run.pool)]
        if lines:
            self._printed_s = time.monotonic()
            _say("\n".join(lines))

    def _end_of_lines(self, record: RunRecord, elapsed_s: float) -> None:
        """Show the end below the lines: the table of ranks and, in a kernel, whatever else its client can show."""
        text = text_view.as_text(record, elapsed_s, self._run.pool, output=())
        if text and self._way != "terminal":
            html = _as_html(record, elapsed_s, self._run.pool, with_chart=not self._can_add_output)
            self._put({"text/plain": text, "text/html": html})
            self._put_chart(record)
        elif text:
            _say(text)


def _say(text: str) -> None:
    """Print a text in lines of its own, and with its newline in one piece: between the two that `print` writes to an
    unbuffered stream, another thread or process may write."""
    shown = terminal_line.encodable(text, sys.stdout)
    sys.stdout.write(f"{terminal_line.beginning(sys.stdout)}{shown}\n")
    sys.stdout.flush()


def _as_html(record: RunRecord, elapsed_s: float, pool: str, **more: Any) -> str:
    from jupyter_distrib.kernel.views.html import as_html

    return as_html(record, elapsed_s, pool, **more)


def route() -> str:
    """Return the kind of view for a run of the cell that is being executed: `widget`, `html`, `lines`, or `terminal`
    outside a kernel."""
    shell = get_ipython()
    if shell is None or not hasattr(shell, "kernel"):
        return "terminal"
    variables = process_environment.present()
    if cell := cell_outputs.cell_id(shell):
        way = "widget" if cell_outputs.shows_widgets(cell) else "html"
    else:
        way = "lines" if cell_outputs.has_keyboard(shell) and not variables.get(COLAB) else "html"
    chosen = variables.get(CHOICE)
    wanted = chosen if chosen in ("widget", "html", "lines") else way
    return "html" if wanted == "widget" and not importlib.util.find_spec("anywidget") else wanted


def show_detached(run: Run) -> None:
    """Show the run from a separate thread, so that the cell ends as soon as the ranks have it or it is queued."""
    try:
        run.start.wait()
    except KeyboardInterrupt:
        run.cancel()
        raise
    view = LiveView(run).open_now()

    def follow() -> None:
        try:
            run.wait(view)
        except BaseException:  # noqa: BLE001 - `result()` raises it
            return

    threading.Thread(target=follow, name=f"jupyter_distrib-{run.id}", daemon=True).start()
