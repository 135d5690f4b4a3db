"""The outputs under the cells of the notebook: views of runs that go on, which pages that were loaded later draw, too,
and what has become of them, kept until a page has it in the notebook's file.

Kernel side; `kernel/sidebar/bridge.py` hands it to the pages. Views are shown and settled in the threads that show
runs, and asked for in any."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from jupyter_distrib.errors import OptionsError
from jupyter_distrib.kernel.session.run import Run

KEPT = 20
"""Cells whose last view is kept, and views that can be drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellPlace:
    """One execution of a notebook's cell."""

    cell: str
    """Its id; empty if the front end does not tell."""
    count: int
    """The number that stands beside it."""
    session: str
    """The session of the page that asked for it, as its messages say."""
    asked_at_s: float
    """Since the epoch, by that page's clock."""

    def to_message(self) -> dict[str, Any]:
        return {"cell": self.cell, "count": self.count, "session": self.session, "asked_at_s": self.asked_at_s}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """The live view of a run."""

    run: Run
    place: CellPlace
    model: str
    """Id of its widget."""
    state: Callable[[], dict[str, Any]]
    """All that the widget's model holds, its code included; for any thread."""


@dataclass(slots=True, kw_only=True, eq=False)
class Settled:
    """The views of the runs of a cell when they have ended, as a notebook file holds them."""

    place: CellPlace
    views: list[dict[str, Any]]
    """In the order of the runs: `run`, `model`, and the last `output` of its display."""
    outcome: list[dict[str, Any]] = field(default_factory=list)
    """The value or the error of the cell."""

    def to_message(self) -> dict[str, Any]:
        return {**self.place.to_message(), "views": self.views, "outcome": self.outcome}


class Cells:
    """All cells of this kernel's notebook. `tell` is given each settled output, as pages understand it."""

    def __init__(self, shell: Any, tell: Callable[[dict[str, Any]], object]) -> None:
        self._shell, self._tell = shell, tell
        self._shown: dict[str, Shown] = {}
        """By run; those whose settled output has not been told yet."""
        self._settled: deque[Settled] = deque(maxlen=KEPT)
        self._unfinished: list[tuple[CellPlace, dict[str, Any]]] = []
        """Settled views of the cell that is running, which may still end with a value or an error."""
        self._counts: dict[str, int] = {}
        """By cell, the number of its last execution; what an earlier one showed is nobody's any more."""
        self._running = ""
        """The cell that is being executed, if the front end tells its id."""

    def show(self, shown: Shown) -> None:
        """Let pages that were loaded after its beginning draw this view, until its end is told."""
        self._shown[shown.run.id] = shown
        for run in list(self._shown)[:-KEPT]:
            self._shown.pop(run, None)

    def views(self) -> list[dict[str, Any]]:
        """Return the runs that can be drawn."""
        shown = list(self._shown.values())
        return [{"run": each.run.id, "model": each.model, **each.place.to_message()} for each in shown]

    def view(self, run: str) -> dict[str, Any]:
        """Return all that the model of a view holds. Raises `OptionsError`."""
        shown = self._shown.get(run)
        if shown is None:
            raise OptionsError(f"no cell shows the run {run} live.")
        return shown.state()

    def settle(self, place: CellPlace, view: dict[str, Any], *, detached: bool) -> None:
        """Keep what the view of a run has become, until a page has it in the notebook's file.

        A page that was reloaded has lost the way to the cell's output. It writes this there instead, together with the
        value or the error of the cell, which went the same way.
        """
        if detached:
            self._shown.pop(view["run"], None)
            self._publish(Settled(place=place, views=[view]))
        else:
            self._unfinished.append((place, view))

    def began(self, _: object) -> None:
        """Note the cell that begins. IPython calls this before every cell, in the thread that runs it."""
        self._running = cell_id(self._shell)

    def ended(self, result: Any) -> None:
        """Publish the views of the cell that has ended. IPython calls this after every cell, in its thread."""
        self._running = ""
        unfinished, self._unfinished = self._unfinished, []
        for shown in list(self._shown.values()):
            if not shown.run.detached:
                self._shown.pop(shown.run.id, None)
        if (cell := cell_id(self._shell)) and result.execution_count:
            self._counts[cell] = result.execution_count
        for place in dict.fromkeys(place for place, _ in unfinished):
            views = [view for where, view in unfinished if where == place]
            self._publish(Settled(place=place, views=views, outcome=self._outcome(result)))

    def settled(self) -> list[dict[str, Any]]:
        """Return the outputs that no page has saved yet."""
        return [each.to_message() for each in list(self._settled) if self._is_last(each)]

    def forget(self, runs: Sequence[str]) -> None:
        """Forget runs whose views stand in the notebook's file: a user may take them out there for good."""
        for settled in list(self._settled):
            if all(view["run"] in runs for view in settled.views):
                with suppress(ValueError):  # meanwhile others have pushed it out
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
        self._settled.append(settled)
        if self._is_last(settled):
            self._tell(settled.to_message())

    def _is_last(self, settled: Settled) -> bool:
        """Whether its cell has not been executed again, and is not just now."""
        cell = settled.place.cell
        return self._counts.get(cell, 0) <= settled.place.count and (not cell or cell != self._running)


def marked(run: str, *, settled: bool) -> dict[str, Any]:
    """Return the metadata by which a page knows the view of a run again, and whether it is the last."""
    return {"jupyter_distrib": {"run": run, "settled": settled}}


def cell_id(shell: Any) -> str:
    """Return the id by which the front end knows the cell that is running.

    Notebook front ends tell; what runs notebooks without anybody watching tells nothing, and this is empty.
    """
    return str((_asked(shell).get("metadata") or {}).get("cellId") or "")


def place(shell: Any) -> CellPlace:
    """Return the execution that is going on."""
    # Versions of IPython count at the beginning of a cell or at its end; in all of them its own number is noted here.
    going_on = getattr(getattr(shell, "displayhook", None), "exec_result", None)
    header = _asked(shell).get("header") or {}
    date = header.get("date")
    return CellPlace(
        cell=cell_id(shell),
        count=getattr(going_on, "execution_count", None) or 0,
        session=str(header.get("session") or ""),
        asked_at_s=date.timestamp() if isinstance(date, datetime) else 0.0,
    )


def _asked(shell: Any) -> Mapping[str, Any]:
    """Return the message by which a front end asked for the execution that is going on."""
    kernel = getattr(shell, "kernel", None)
    return kernel.get_parent("shell") if kernel is not None else {}
