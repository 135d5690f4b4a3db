"""One execution of a cell: its record, the values that came back, and how to wait for it and stop it.

Events arrive in the node's thread (`deliver`), where observers are told of them; whoever waits does so in its own
thread, usually the kernel's main one, where an interrupt of the kernel is raised. The run is folded in `RunRecord`;
this class only adds what a fold must not have: a lock, a clock, and the way to the agent.
"""

from __future__ import annotations

import linecache
import os
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from jupyter_distrib.kernel.record import failures
from jupyter_distrib.kernel.record.observer import Observer
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.kernel.session.observers import RunObservers
from jupyter_distrib.kernel.session.results import Results
from jupyter_distrib.serialization import payload
from jupyter_distrib.system import formatting, interrupts, paths
from jupyter_distrib.wire.messages import (
    KILL_AFTER_S,
    Ended,
    Exited,
    Failed,
    Failure,
    Frame,
    Interrupted,
    Noted,
    Parcel,
    Returned,
    RunEvent,
)

LATE_S = 1.0
"""A press that comes this soon after the end of a run that was stopped was meant for it."""


class View(Observer, Protocol):
    """An observer that shows the run in the thread that waits for it."""

    def wait_for_news(self) -> None:
        """Return when there is something new to be shown, or as soon as the run has ended."""

    def draw(self, record: RunRecord, elapsed_s: float) -> None:
        """Show a record that is so many seconds old, under the lock of the run."""


class Run:
    """A run, as `%%distributed --detach` returns it, and as every other cell waits for it.

    Args:
        record: Of this run, fresh.
        stop: Asks the pool to stop the run; with True, to kill it.
        cell: Source lines by file name, for tracebacks.
        cell_id: By which the front end finds the cell again.
        echoes_output: Its ranks print straight into the notebook.
    """

    def __init__(
        self,
        record: RunRecord,
        stop: Callable[[bool], None],
        *,
        pool: str,
        cell: Mapping[str, Sequence[str]] | None = None,
        age_s: float = 0.0,
        detached: bool = False,
        cell_id: str = "",
        echoes_output: bool = False,
    ) -> None:
        self.record = record
        self.pool = pool
        self.echoes_output = echoes_output
        self.detached = detached
        self.cell_id = cell_id
        self.began_at_s = time.time() - age_s
        self.stop_asked_at_s: float | None = None
        """Since the epoch, as `began_at_s`."""
        self.kill_asked = False
        self.interrupted = False
        """The user asked for the stop."""
        self.observers = RunObservers()
        self.on_ended: list[Callable[[], object]] = []
        self.held: object = ()
        """The kernel's own classes that were sent, alive until values have come."""
        self._pressed_late = False
        """Whether there was a press when the run had ended."""
        self._stop = stop
        self._thread = threading.current_thread()
        self._cell = cell or {}
        self._files: dict[str, str] = {}
        """By the name that is shown, the file name that `linecache` has the lines under."""
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._parcels: dict[int, tuple[Parcel, int | None]] = {}
        self._results: Results | None = None
        self._started_s = time.monotonic() - age_s
        self._ended_s: float | None = None

    @property
    def id(self) -> str:
        return self.record.run

    @property
    def elapsed_s(self) -> float:
        return (self._ended_s or time.monotonic()) - self._started_s

    def done(self) -> bool:
        """Whether every rank has ended."""
        return self._ended.is_set()

    @property
    def abandoned(self) -> bool:
        """Nobody waits for it, though somebody should: an interrupt came before whoever began it could. Asked by who
        wants its ranks."""
        elsewhere = self._thread is threading.current_thread() or not self._thread.is_alive()
        return elsewhere and not self.detached and not self.done()

    def wait_ended(self, timeout_s: float | None) -> bool:
        """Whether it ends within this time; takes no part in how it ends."""
        return interrupts.wait(self._ended, timeout_s)

    @property
    def state(self) -> str:
        """`running`, `stopping`, or how it ended: `done`, the worst that happened to a rank, or `refused` if the cell
        never came to its ranks."""
        if not self.done():
            return "stopping" if self.interrupted else "running"
        states = {rank.state for rank in self.record.ranks.values()}
        if worst := next((state for state in ("lost", "failed", "interrupted") if state in states), ""):
            return worst
        return "done" if self.record.ok else "refused"

    @property
    def stopping(self) -> str:
        """How far a stop has come: `asked`, or `killed` when ranks that have not stopped are; empty without one."""
        if self.stop_asked_at_s is None:
            return ""
        ended_at_s = self.began_at_s + self.elapsed_s
        return "killed" if self.kill_asked or ended_at_s >= self.stop_asked_at_s + KILL_AFTER_S else "asked"

    def result(self, timeout_s: float | None = None) -> Any:
        """The `Results`, or None if no rank returned anything; waits for the end of the run.

        Raises:
            TimeoutError: It has not ended after `timeout_s` seconds; it goes on.
            BaseException: What the first failing rank raised.
        """
        if not self.wait_ended(timeout_s):
            raise TimeoutError(f"run {self.id} has not ended after {timeout_s} s; it goes on.")
        return self._conclude()

    def logs(self, rank: int | None = None) -> str:
        """All that a rank wrote so far, or all ranks one after another."""
        ranks = sorted(self.record.ranks) if rank is None else [rank]
        texts = []
        for number in ranks:
            with suppress(OSError):
                text = self.log_file(number).read_text("utf-8", "backslashreplace")
                texts.append(f"--- rank {number}\n{text}" if rank is None and text else text)
        return "".join(texts)

    def log_file(self, rank: int) -> Path:
        return Path(self.record.log_directory or paths.log_directory() / self.id) / f"rank{rank}.log"

    def cancel(self, *, force: bool = False) -> None:
        """Stop the run, or kill it; returns at once, from any thread. `result()` then raises KeyboardInterrupt."""
        self.interrupted = True
        self.kill_asked = self.kill_asked or force
        self.stop_asked_at_s = self.stop_asked_at_s or time.time()
        self._stop(force)

    def wait(self, view: View | None = None) -> Any:
        """Wait for the end in the calling thread, showing the run in `view`; an interrupt stops the run, a second one
        kills it.

        Returns what `result` returns, and raises what it raises; after an interrupt, `KeyboardInterrupt`.
        """
        with self._taking_presses():
            self._show_until_ended(view)
            self.observers.finish(given_up=lambda: self._pressed_late)
            self._draw(view, at_end=True)
        return self._conclude()

    def _show_until_ended(self, view: View | None) -> None:
        if view is None:
            self.wait_ended(None)
            return
        self.observers.add(view)
        self._draw(view)
        while not self.done():
            view.wait_for_news()
            self._draw(view)

    def _draw(self, view: View | None, *, at_end: bool = False) -> None:
        """Have it shown; as ended only when nothing is added any more."""
        if view is not None:
            with self._lock:
                if at_end or not self.record.ended:
                    view.draw(self.record, self.elapsed_s)

    def note(self, text: str) -> None:
        """Put a sentence into the output of the run; from any thread."""
        self.deliver(Noted(run=self.id, rank=None, text=text), ())

    @contextmanager
    def _taking_presses(self) -> Iterator[None]:
        """While this thread waits, an interrupt is an order and no exception: one raised between two lines would leave
        the run behind.

        Only Python's own handler is replaced, which ipykernel sets for the time of a cell; it is put back before
        anything else runs.
        """
        default = signal.default_int_handler
        before = signal.getsignal(signal.SIGINT)
        replaceable = before is default or isinstance(before, _LatePresses)
        if threading.current_thread() is not threading.main_thread() or not replaceable:
            yield
            return
        signal.signal(signal.SIGINT, self._pressed)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, _LatePresses() if self.interrupted else default)

    def _pressed(self, signum: int, frame: types.FrameType | None) -> None:
        self._pressed_late = self.done()
        self.cancel(force=self.interrupted)

    def deliver(self, event: RunEvent, fds: Sequence[int]) -> None:
        """Fold one event; called in the node's thread. Takes the descriptors."""
        if isinstance(event, Returned) and event.value is not None:
            self._parcels[event.rank] = (event.value, fds[0] if fds else None)
            event = replace(event, value=None)
        else:
            for fd in fds:
                os.close(fd)
        event = self._with_cell_names(event)
        with self._lock:
            self.record.apply(event)
            if not isinstance(event, Ended):
                self.observers.tell(event, self.record)
                return
        try:
            self._end()
        finally:
            with self._lock:
                self.observers.tell(event, self.record)

    def _end(self) -> None:
        self._ended_s = time.monotonic()
        calls, self.on_ended = self.on_ended, []  # nothing that they hold is held any longer
        try:
            for call in calls:
                call()
        finally:
            self._ended.set()

    def _conclude(self) -> Any:
        """The values if all is well, else the exception, raised outside any `except` block."""
        results = self._unpacked() if self._results is None else self._results
        if self.detached:  # `result` may be called again; of other runs the notebook has what it wants
            self._results = results
        if self.record.ok and not self.interrupted:
            self.held = ()
            return results if any(value is not None for value in results) else None
        exception = self._exception()
        with suppress(AttributeError, TypeError):
            exception.__dict__["results"] = results
        raise exception

    def _exception(self) -> BaseException:
        record, elapsed_s = self.record, self.elapsed_s
        if self.interrupted:
            return failures.to_interrupt(record, elapsed_s, self._source_of)
        if record.limit_s is not None:
            return failures.to_timeout(record, record.limit_s, elapsed_s, self._source_of)
        if failures.cause(record) is None and any(rank.state == "interrupted" for rank in record.ranks.values()):
            return failures.to_interrupt(
                record, elapsed_s, self._source_of
            )  # stopped from elsewhere, or inside the inline pool
        return failures.to_exception(record, _unpack_exception, self._source_of, elapsed_s, colors=True)

    def _unpacked(self) -> Results:
        values: dict[int, Any] = {rank: None for rank, state in self.record.ranks.items() if state.returned}
        for rank, (parcel, fd) in self._parcels.items():
            values[rank] = payload.unpack_value(*payload.from_parcel(parcel, fd))
        self._parcels.clear()
        return Results(values)

    def _with_cell_names(self, event: RunEvent) -> RunEvent:
        """Functions of plain cells have file names that only ipykernel knows; the front end's name for them is `Cell
        In[2]`."""
        if isinstance(event, Failed):
            return replace(event, failure=self._failure(event.failure))
        if isinstance(event, (Interrupted, Exited)) and event.frames:
            return replace(event, frames=self._frames(event.frames))
        return event

    def _failure(self, failure: Failure) -> Failure:
        cause = failure.cause and self._failure(failure.cause)
        return replace(failure, frames=self._frames(failure.frames), cause=cause)

    def _frames(self, frames: Sequence[Frame]) -> tuple[Frame, ...]:
        named = []
        for frame in frames:
            name = _cell_name(frame.filename)
            self._files[name] = frame.filename
            text = frame.text or linecache.getline(frame.filename, frame.line).strip()
            named.append(replace(frame, filename=name, text=text))
        return tuple(named)

    def _source_of(self, filename: str) -> Sequence[str] | None:
        return self._cell.get(filename) or linecache.getlines(self._files.get(filename, filename)) or None

    def __repr__(self) -> str:
        states = [rank.state for rank in self.record.ranks.values()]
        counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        return f"Run {self.id} of {self.record.label}: {counts}, {formatting.duration(self.elapsed_s)}"

    def __del__(self) -> None:
        for _, fd in self._parcels.values():
            if fd is not None:
                os.close(fd)


class _LatePresses:
    """Takes the presses that were meant for a run which has just been stopped, then is Python's own handler again.

    One that met ipykernel (7.4) while it shows the first would cost the cell its reply: the front end would wait for
    ever. ipykernel sets its own handler for each cell.
    """

    def __init__(self) -> None:
        self._until_s = time.monotonic() + LATE_S

    def __call__(self, signum: int, frame: types.FrameType | None) -> None:
        if time.monotonic() >= self._until_s:
            signal.signal(signum, signal.default_int_handler)
            signal.default_int_handler(signum, frame)


def _unpack_exception(parcel: Parcel) -> BaseException | None:
    return payload.unpack_exception(*payload.from_parcel(parcel, None))


def early_interrupt(interrupt: KeyboardInterrupt) -> KeyboardInterrupt:
    """Return what to raise, outside any `except` block, for an interrupt that met the kernel before it waited for a
    run; that of a run is returned as it is.

    IPython cannot show every such interrupt: Python 3.11 may raise it where a generator begins, which has no line, and
    IPython 9 fails to format a frame without one, so the cell would end without an error.
    """
    if "_render_traceback_" in vars(interrupt):
        return interrupt
    return failures.to_early_interrupt(
        [
            Frame(filename=_cell_name(frame.f_code.co_filename), line=line, function=frame.f_code.co_name)
            for frame, line in traceback.walk_tb(interrupt.__traceback__)
            if line
        ]
    )


def _cell_name(filename: str) -> str:
    """`Cell In[2]` for the file name under which the kernel compiled that cell; any other name stays as it is."""
    # Asked in the node's thread, maybe while another one is importing IPython: its modules may be there in part only.
    shells = getattr(sys.modules.get("IPython.core.interactiveshell"), "InteractiveShell", None)
    shell = shells.instance() if shells is not None and shells.initialized() else None
    name = shell.compile.format_code_name(filename) if shell is not None else None
    return " ".join(name) if name else filename
