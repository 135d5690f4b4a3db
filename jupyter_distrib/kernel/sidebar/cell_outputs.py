"""The outputs under the notebook's cells: views of runs in progress, also for pages that are loaded later, and final
views, kept until a page has saved them in the notebook's file.

Kernel side; `kernel/sidebar/bridge.py` hands them to the pages. Views are shown and settled in the threads that show
runs, and requested in any thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from jupyter_distrib.errors import OptionsError
from jupyter_distrib.kernel.session.runs import prompts
from jupyter_distrib.system.data_class import data_class

REPAIR_S = 10.0
"""Seconds that one page has for repairing an output, during which no other page does so."""
KEPT = 20
"""Number of cells whose last view is kept, saved or not, and of views that can be drawn."""


@data_class
class CellPlace:
    """One execution of a notebook's cell."""

    cell: str
    """The id of the cell; empty if the front end does not give it."""
    count: int
    """The execution count beside the cell."""
    session: str
    """The session of the page that requested the execution, from its messages."""
    asked_at_s: float
    """The time of the request, since the epoch, by that page's clock."""

    def to_message(self) -> dict[str, Any]:
        return {"cell": self.cell, "count": self.count, "session": self.session, "asked_at_s": self.asked_at_s}


@data_class
class Shown:
    """The live view of a run, or of the runs of a sweep."""

    view: str
    """The name by which pages find it among the outputs of the cell."""
    runs: Callable[[], Sequence[str]]
    """Returns the ids of the runs that it shows."""
    place: CellPlace
    model: str
    """The id of its widget."""
    state: Callable[[], dict[str, Any]]
    """Returns the whole state of the widget's model, including its code; from any thread."""
    detached: bool
    """Whether it may outlive the execution of the cell."""


@dataclass(slots=True, kw_only=True, eq=False)
class Settled:
    """The final views of the runs of a cell, as a notebook file holds them."""

    place: CellPlace
    views: list[dict[str, Any]]
    """The views in the order of the runs: `run`, `model`, and the last `output` of its display."""
    outcome: list[dict[str, Any]] = field(default_factory=list)
    """The value or the error of the cell."""
    saved_ms: float = 0.0
    """The time of the notebook's file, by the server's clock, in which a page has saved them; 0 until then."""

    @property
    def names(self) -> list[str]:
        return [view["run"] for view in self.views]

    def to_message(self) -> dict[str, Any]:
        return {**self.place.to_message(), "views": self.views, "outcome": self.outcome}


class Cells:
    """The cells of this kernel's notebook. `send` is called with each settled output, as a message for pages."""

    def __init__(self, shell: Any, send: Callable[[dict[str, Any]], object]) -> None:
        self._shell, self._send = shell, send
        self._shown: dict[str, Shown] = {}
        """The views whose final output has not been sent yet, by name."""
        self._settled: deque[Settled] = deque(maxlen=KEPT)
        self._saved: deque[Settled] = deque(maxlen=KEPT)
        """The outputs that are in the notebook's file; a page may still show an older one."""
        self._repairers: dict[tuple[str, ...], tuple[str, float]] = {}
        """The page that repairs the output of these runs, and the time of its request."""
        self._unfinished: list[tuple[CellPlace, dict[str, Any]]] = []
        """Final views of the running cell, which may still end with a value or an error."""
        self._counts: dict[str, int] = {}
        """The last execution count of each cell; views of an earlier execution are dropped."""
        self._running = ""
        """Id of the running cell, if the front end gives it."""

    @property
    def running(self) -> str:
        """The id of the running cell; empty if there is none or the front end does not give it."""
        return self._running

    def show(self, shown: Shown) -> None:
        """Let pages that are loaded later draw the view, until its final output is sent."""
        self._shown[shown.view] = shown
        for view in list(self._shown)[:-KEPT]:
            self._shown.pop(view, None)

    def views(self) -> list[dict[str, Any]]:
        """Return the views that can be drawn. `run` is the name of the view, which is that of its run if it has one."""
        shown = list(self._shown.values())
        return [
            {"run": each.view, "runs": [*each.runs()], "model": each.model, **each.place.to_message()} for each in shown
        ]

    def view(self, run: str) -> dict[str, Any]:
        """Return the whole state of a view's model. Raises `OptionsError`."""
        shown = self._shown.get(run)
        if shown is None:
            raise OptionsError(f"no cell shows the run {run} live.")
        return shown.state()

    def keep_final_view(self, place: CellPlace, view: dict[str, Any], *, detached: bool) -> None:
        """Keep the final view of a run until a page has written it into the notebook's file.

        A page that was reloaded no longer receives the cell's output. It writes this view into the cell instead,
        together with the value or the error of the cell, which it did not receive either.
        """
        if detached:
            self._shown.pop(view["run"], None)
            self._publish(Settled(place=place, views=[view]))
        else:
            self._unfinished.append((place, view))

    def began(self, _: object) -> None:
        """Record the beginning of a cell. IPython calls this before every cell, in the thread that runs it."""
        self._running = cell_id(self._shell)

    def ended(self, result: Any) -> None:
        """Publish the views of a cell at its end. IPython calls this after every cell, in its thread."""
        self._running = ""
        unfinished, self._unfinished = self._unfinished, []
        for shown in list(self._shown.values()):
            if not shown.detached:
                self._shown.pop(shown.view, None)
        if (cell := cell_id(self._shell)) and result.execution_count:
            self._counts[cell] = result.execution_count
        for place in dict.fromkeys(place for place, _ in unfinished):
            views = [view for where, view in unfinished if where == place]
            self._publish(Settled(place=place, views=views, outcome=self._outcome(result)))

    def unsaved(self, live: Sequence[str] = (), loaded_ms: float | None = None) -> list[dict[str, Any]]:
        """Return the outputs that no page has saved yet, and saved ones that the requesting page does not have.

        Args:
            live: The runs that the page shows live. Runs among them that have ended are returned, no matter which
                page has saved them.
            loaded_ms: The time of the file that the page has loaded, by the server's clock. Outputs that were saved
                later are not in it. None: not known.
        """
        saved = list(self._saved)
        newer = [] if loaded_ms is None else [each for each in saved if each.saved_ms > loaded_ms]
        shown = [each for each in saved if any(view["run"] in live for view in each.views)]
        found = dict.fromkeys([*newer, *shown, *self._settled])
        return [each.to_message() for each in found if self._is_last(each)]

    def grant_repair(self, runs: tuple[str, ...], page: str) -> bool:
        """Return whether this page may write the output of these runs into its notebook: the first one that asks."""
        now_s = time.monotonic()
        other, at_s = self._repairers.get(runs, (page, now_s))
        if other != page and now_s < at_s + REPAIR_S:
            return False
        self._repairers = {each: who for each, who in self._repairers.items() if now_s < who[1] + REPAIR_S}
        self._repairers[runs] = page, now_s
        return True

    def note_saved(self, runs: Sequence[str], saved_ms: float) -> None:
        """Note runs whose views are in the notebook's file, from which a user may remove them for good: a page that
        loads this file or a later one does not get them again."""
        for settled in list(self._settled):
            if all(view["run"] in runs for view in settled.views):
                settled.saved_ms = saved_ms
                self._saved.append(settled)
                with suppress(ValueError):  # newer ones may have pushed it out meanwhile
                    self._settled.remove(settled)

    def _outcome(self, result: Any) -> list[dict[str, Any]]:
        error = result.error_in_exec or result.error_before_exec
        if error is not None:
            lines: Sequence[str] = getattr(self._shell, "_last_traceback", None) or []
            name = type(error).__name__
            return [{"output_type": "error", "ename": name, "evalue": str(error), "traceback": list(lines)}]
        if result.result is None:
            return []
        data, metadata = self._shell.display_formatter.format(result.result)
        count = result.execution_count
        return [{"output_type": "execute_result", "execution_count": count, "data": data, "metadata": metadata}]

    def _publish(self, settled: Settled) -> None:
        for before in [each for each in self._settled if each.place == settled.place and each.names == settled.names]:
            with suppress(ValueError):  # newer ones may have pushed it out meanwhile
                self._settled.remove(before)  # of a view to which something was added after its end
        self._settled.append(settled)
        if self._is_last(settled):
            self._send(settled.to_message())

    def _is_last(self, settled: Settled) -> bool:
        """Return whether the cell has not been executed again and is not being executed now."""
        cell = settled.place.cell
        return self._counts.get(cell, 0) <= settled.place.count and (not cell or cell != self._running)


def marked(run: str, *, settled: bool) -> dict[str, Any]:
    """Return metadata that identify the view of a run for pages, and say whether it is the final one."""
    return {"jupyter_distrib": {"run": run, "settled": settled}}


def cell_id(shell: Any) -> str:
    """Return the front end's id of the running cell.

    Notebook front ends send it; programs that execute notebooks in batch do not, and then it is empty.
    """
    return _cell_in(_request_message(shell))


def _cell_in(request: Mapping[str, Any]) -> str:
    return str((request.get("metadata") or {}).get("cellId") or "")


def shows_widgets(cell: str) -> bool:
    """Return whether the front end is known to run this package's widget, by its id of a cell: JupyterLab or Notebook
    7, whose ids are plain; VS Code's are addresses, and others send none."""
    return bool(cell) and ":" not in cell


def has_keyboard(shell: Any) -> bool:
    """Return whether the front end of the running cell can ask its user; programs that execute notebooks cannot."""
    return bool((_request_message(shell).get("content") or {}).get("allow_stdin"))


def missing_prompt(shell: Any) -> str:
    """Return the reason why the user of the running cell cannot be asked; empty if that is possible."""
    if getattr(shell, "kernel", None) is None:
        return prompts.terminal()
    return "" if has_keyboard(shell) else "this front end takes no input"


def place(shell: Any) -> CellPlace:
    """Return the present execution of a cell."""
    # IPython counts at the beginning of a cell or, in other versions, at its end; this result has the cell's number.
    going_on = getattr(getattr(shell, "displayhook", None), "exec_result", None)
    request = _request_message(shell)
    header = request.get("header") or {}
    date = header.get("date")
    return CellPlace(
        cell=_cell_in(request),
        count=getattr(going_on, "execution_count", None) or 0,
        session=str(header.get("session") or ""),
        asked_at_s=date.timestamp() if isinstance(date, datetime) else 0.0,
    )


def _request_message(shell: Any) -> Mapping[str, Any]:
    """Return the front end's message that requested the current execution; from xeus-python, only its header."""
    kernel = getattr(shell, "kernel", None)
    get_parent: Callable[..., Mapping[str, Any]] | None = getattr(kernel, "get_parent", None)
    if get_parent is None:
        return {}
    try:
        return get_parent("shell")
    except TypeError:  # a kernel that does not distinguish channels
        return get_parent()
