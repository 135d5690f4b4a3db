"""One execution of a cell: its record, its returned values, and the means to wait for it and to stop it.

Events arrive in the node's thread (`deliver`), which passes them to the observers; a caller waits in its own thread,
usually the kernel's main one, where an interrupt of the kernel is raised. `RunRecord` folds the events; this class
adds only what a fold must not have: a lock, a clock, and the connection to the agent.

    Run           the whole
    PoolLink      its connection to the pool of its ranks
    RunStart      from the queue to its ranks: queued, starting, begun or refused. In any thread
    RunClock      its beginning, end and duration. In any thread
    StopOrder     the user's requests to stop it. From any thread, and from a signal handler
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol, overload

from jupyter_distrib.errors import DistributedError
from jupyter_distrib.kernel.analysis import failures
from jupyter_distrib.kernel.record.observer import Observer
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.kernel.session.runs import handlers, interrupt_presses
from jupyter_distrib.kernel.session.runs.cell_sources import CellSources
from jupyter_distrib.kernel.session.runs.observers import EndObserver, RunObservers
from jupyter_distrib.kernel.session.runs.program import Program
from jupyter_distrib.kernel.session.runs.results import Results, ReturnedValues, unpack_exception
from jupyter_distrib.system import formatting, interrupts, open_files
from jupyter_distrib.system.data_class import data_class
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.descriptors import NO_DESCRIPTORS, Descriptors

if TYPE_CHECKING:
    from jupyter_distrib.kernel.analysis.metrics import Metrics
    from jupyter_distrib.kernel.analysis.shares import Shares
    from jupyter_distrib.kernel.session.runs.following import Feed

_UNANSWERED_S = 1.0
"""Seconds after an order to kill from which another press of Stop gives up a pool that has not answered."""
STACKS_S = 2.0
"""Seconds to wait for the ranks' stacks; for a rank that cannot answer, an answer comes within 0.7 s."""
POLL_S = 0.02
_SHOWN_S = 1.0
"""Maximum seconds that `result` waits for what other threads show of the end."""
_AWAKE_S = 0.25
"""Seconds after which a loop that awaits a run looks whether its task was cancelled."""


class RunCancelled(DistributedError, CancelledError):
    """A run was cancelled while it was queued, so no rank has executed any of it. `except Exception` catches it,
    as it does the error of a cancelled future."""


@data_class
class PoolLink:
    """The connection of a run to the pool of its ranks."""

    pool: str
    """The pool's name."""
    stop: Callable[[bool], None] = lambda force: None
    """Asks the pool to stop the run; with True, to kill it."""
    ask_stacks: Callable[[], object] = lambda: None
    """Asks the pool for the Python stacks of the ranks."""
    debug: Callable[[int, str, str], object] = lambda rank, action, line: None
    """Sends an order to a rank's debugger, see `Debug`: the rank, the order, and its line."""
    abandon: Callable[[], None] = lambda: None
    """Gives up the pool, after a third press of Stop without effect."""
    echoes_output: bool = False
    """Whether its ranks print straight into the notebook."""


class View(Observer, Protocol):
    """An observer that shows the run in the thread that waits for it."""

    def wait_for_news(self) -> None:
        """Return when there is something new to show, or as soon as the run has ended."""

    def draw(self, record: RunRecord, elapsed_s: float) -> None:
        """Show the record of a run after `elapsed_s` seconds, under the lock of the run."""


class Run:
    """One run of a cell: `%%distributed --detach` and `submit` return it, any other cell waits for it.

    Args:
        record: The run's record, still without events.
        link: Its connection to the pool.
        cell: Source lines of the cell by file name, for tracebacks.
        cell_id: The front end's id of the cell.
        in_words: Returns a sentence about options in the words of the caller that began the run.
        awaited: Whether the call that begins it waits for its end; False for a run that goes on beside the notebook.
    """

    def __init__(
        self,
        record: RunRecord,
        link: PoolLink,
        *,
        cell: Mapping[str, Sequence[str]] | None = None,
        age_s: float = 0.0,
        detached: bool = False,
        awaited: bool = True,
        cell_id: str = "",
        in_words: Callable[[str], str] = str,
    ) -> None:
        self.record = record
        self.link = link
        self.start = RunStart()
        self.detached = detached
        """Whether it outlives the kernel."""
        self.concurrent = detached or not awaited
        """Whether no cell waits for it."""
        self.cell_id = cell_id
        self.group = ""
        """The name that the runs of one sweep, or those submitted by one cell, have in common; empty for others."""
        self.clock = RunClock(age_s)
        self.stop_order = StopOrder(link)
        self.values = ReturnedValues()
        self.observers = RunObservers()
        self.on_ended: list[Callable[[], object]] = []
        self.program: Program | None = None
        self.of_function = False
        """Whether it is a function's call, whose value counts even if it is None."""
        self._seen: Callable[[], Results | None] = lambda: None
        """The results, for as long as the notebook has them."""
        self._sources = CellSources(cell or {})
        self._in_words = in_words
        self._is_cancelled = False
        """Whether it was cancelled before it had ranks."""
        self._is_drawn = True
        """Whether views are drawn; no longer after one could not be."""
        self._thread = threading.current_thread()
        self._has_waiter = False
        self._lock = threading.Lock()

    @property
    def id(self) -> str:
        return self.record.run

    @property
    def pool(self) -> str:
        return self.link.pool

    @property
    def place(self) -> int:
        """The place in the queue, counted from 1; 0 if the run is not queued."""
        return self.start.place

    @property
    def elapsed_s(self) -> float:
        return self.clock.elapsed_s

    @property
    def interrupted(self) -> bool:
        """Return whether the user asked to stop the run."""
        return self.stop_order.asked_at_s is not None

    def done(self) -> bool:
        """Return whether the run has ended."""
        return self.clock.ended.is_set()

    @property
    def abandoned(self) -> bool:
        """Return whether no thread waits for the run, because the thread that began it was interrupted before it could.

        Read by the next cell that wants its ranks."""
        if self._has_waiter:  # Python 3.11 takes a thread for dead when a `join` of it was interrupted
            return False
        elsewhere = self._thread is threading.current_thread() or not self._thread.is_alive()
        return elsewhere and not self.concurrent and not self.done()

    def wait_ended(self, timeout_s: float | None) -> bool:
        """Wait for the end of the run, without stopping it. Return whether it has ended within this time."""
        return interrupts.wait(self.clock.ended, timeout_s)

    @property
    def state(self) -> str:
        """The state of the run: `queued`, `starting`, `running`, `stopping`, `done`, the worst end of a rank (`lost`,
        `failed` or `interrupted`), or `refused` if the cell did not reach its ranks."""
        if not self.done():
            return self.start.state or ("stopping" if self.interrupted else "running")
        if self.start.state:
            return "interrupted" if self.refusal is None else "refused"
        states = {rank.state for rank in self.record.ranks.values()}
        if worst := next((state for state in ("lost", "failed", "interrupted") if state in states), ""):
            return worst
        return "done" if states <= {"done"} else "refused"

    @property
    def stopping(self) -> str:
        """The stage of a stop: `asked`, `killed`, or empty without a request."""
        return self.stop_order.stage(self.clock.began_at_s + self.elapsed_s)

    # ------------------------------------------------------------------------------------------------ in the queue

    def move_on(self, state: str, text: str, place: int = 0) -> None:
        """Set the state of a run whose ranks do not have their order yet; the view shows the text."""
        self.start.move_on(state, place)
        self.record.remark, self.record.changes = text, self.record.changes + 1

    def wait_for(self, reason: str) -> None:
        """Record that the run waits for ranks or GPUs that others use."""
        self.move_on("starting", reason)
        self.start.wake_waiting()

    def stop_by(self, stop: Callable[[bool], None]) -> None:
        """Set the function that stops the run, which has no ranks yet."""
        self.link = replace(self.link, stop=stop)
        self.stop_order.redirect(self.link)

    def begin(self, record: RunRecord, link: PoolLink) -> None:
        """Begin with these ranks: the run is no longer queued."""
        with self._lock:
            record.notes = [*record.notes, *self.record.notes]
            self.record = record
            self.start.begin()
        self.link = link
        self.clock.restart()

    def sent(self) -> None:
        """Repeat a stop that was requested before the ranks were sent the cell, since a pool cannot stop a run that it
        does not know."""
        if not self.done():
            self.stop_order.redirect(self.link)

    def end_unplaced(self, refusal: BaseException | None) -> None:
        """End the run, which has no ranks: refused, or cancelled if `refusal` is None."""
        self.start.refuse(refusal)
        self._is_cancelled = refusal is None
        self.record.remark = str(refusal) if refusal is not None else "cancelled before it began"
        self.deliver(m.Ended(run=self.id, at_s=time.monotonic()), NO_DESCRIPTORS)
        self.start.wake_waiting()

    # ------------------------------------------------------------------------------------------------ its end

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait for the end in an event loop and return the `Results`, as `result` does; the run goes on if the waiting
        task is cancelled.

        Raises:
            concurrent.futures.CancelledError: The run was stopped. (A KeyboardInterrupt would end the loop.)
            BaseException: The exception of the first rank that failed.
        """
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop is closed, and with it the task that waited
                loop.call_soon_threadsafe(ended.set)

        self.call_at_end(wake)
        while not ended.is_set():  # Stop cancels the cell's task without waking up the loop of ipykernel
            with suppress(TimeoutError):
                yield from asyncio.wait_for(ended.wait(), _AWAKE_S).__await__()
        try:
            return self.result()
        except KeyboardInterrupt as error:
            stopped = CancelledError(str(error))
        raise stopped

    @property
    def refusal(self) -> BaseException | None:
        """The error with which the run was refused before it had ranks; None without one."""
        return self.start.refusal

    def seen_values(self) -> dict[int, Any]:
        """Return the ranks' values, as far as the notebook or the run still has them."""
        if self.concurrent and self.done() and self.state == "done":
            self.result()
        results = self._seen()
        return {} if results is None else dict(results.items())

    def call_at_end(self, call: Callable[[], object]) -> None:
        """Call a function when the run has ended, at once if it already has; in any thread, maybe twice."""
        self.observers.add(EndObserver(call))
        if self.done():
            call()

    def result(self, timeout_s: float | None = None, *, timeout: float | None = None) -> Any:
        """Wait for the end of the run and return the `Results`, or None if it is a cell's and no rank has a value.
        `timeout` is the same as `timeout_s`; futures have it.

        Raises:
            TimeoutError: The run has not ended after `timeout_s` seconds; it goes on.
            concurrent.futures.CancelledError: The run was cancelled while it was queued.
            KeyboardInterrupt: The run was stopped while its ranks executed it.
            BaseException: The exception of the first rank that failed.
        """
        limit_s = timeout_s if timeout is None else timeout
        if not self.wait_ended(limit_s):
            raise TimeoutError(f"run {self.id} has not ended after {limit_s} s; it goes on.")
        interrupts.wait(self.clock.shown, _SHOWN_S)  # the program may end with this call
        return self._conclude()

    @overload
    def logs(self, rank: int | None = None, *, follow: Literal[False] = False) -> str: ...
    @overload
    def logs(self, rank: int | None = None, *, follow: Literal[True]) -> Iterator[str]: ...
    def logs(self, rank: int | None = None, *, follow: bool = False) -> str | Iterator[str]:
        """Return the output of a rank so far, or of all ranks, one after another.

        With `follow`, return an iterator over its lines, which waits for new ones and ends with the run; those of all
        ranks begin with the rank: `[1] loss 0.3`.

        Raises:
            PoolError: The run has no such rank, or its logs were removed to free space.
        """
        from jupyter_distrib.kernel.session.runs import following

        return following.lines(self, rank) if follow else following.text(self, rank)

    def log_file(self, rank: int) -> Path:
        """Return the path of a rank's log. Raises the same as `logs`."""
        from jupyter_distrib.kernel.session.runs import following

        return following.log_file(self, rank)

    def events(self) -> Iterator[dict[str, Any]]:
        """Return an iterator over the past and coming events of the run, which ends with the run.

        Each event is a dictionary of JSON values with its kind as `event`: `state`, `output`, `metrics`, `progress`,
        `rank`, `note`, `stall`, `restart`, and `ended` as the last one.
        """
        from jupyter_distrib.kernel.session.runs import following

        return following.events(self)

    @contextmanager
    def feeding(self) -> Iterator[Feed]:
        """Provide a feed of the past and coming events of the run, within the block."""
        from jupyter_distrib.kernel.session.runs.following import Feed

        with self._lock:
            feed = Feed(self.record)
            self.observers.add(feed)
        try:
            yield feed
        finally:
            with self._lock:
                self.observers.remove(feed)

    def stacks(self, timeout_s: float = STACKS_S) -> dict[int, m.StackSeen]:
        """Return the Python stack of each rank that is executing the cell, as soon as all have answered.

        A rank that ends meanwhile, or whose pool does not answer within `timeout_s` seconds, is left out."""
        ranks = self.record.ranks
        before = {rank: state.stack for rank, state in ranks.items() if not state.finished}
        self.link.ask_stacks()
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s and not self.wait_ended(POLL_S):
            if all(ranks[rank].finished or ranks[rank].stack is not old for rank, old in before.items()):
                break
        return {
            rank: stack for rank, old in before.items() if (stack := ranks[rank].stack) is not None and stack is not old
        }

    @contextmanager
    def reading(self) -> Iterator[RunRecord]:
        """Provide the record, which no event changes within the block."""
        with self._lock:
            yield self.record

    @property
    def metrics(self) -> Metrics:
        """The numbers reported by ranks so far: rows, points by name, or a `pandas.DataFrame`."""
        from jupyter_distrib.kernel.analysis.metrics import Metrics

        with self._lock:
            return Metrics.of(self.record)

    @property
    def shares(self) -> Shares:
        """Shares of data, computation, other ranks and the rest in the time of each rank's training so far."""
        from jupyter_distrib.kernel.analysis.shares import Shares

        with self._lock:
            return Shares.of(self.record)

    def cancel(self, *, force: bool = False) -> None:
        """Stop the run, or kill it; returns at once, from any thread. `result()` then raises KeyboardInterrupt, or
        `CancelledError` for a run that was still queued."""
        self.stop_order.give(force=force)

    def wait(self, view: View | None = None) -> Any:
        """Wait for the end in the calling thread and show the run in `view`; an interrupt stops the run, a second one
        kills it.

        Returns and raises the same as `result`; after an interrupt, raises `KeyboardInterrupt`.
        """
        with interrupt_presses.interrupts_as_orders(self._pressed, stopped=lambda: self.interrupted):
            self._has_waiter = True
            try:
                self._show_until_ended(view)
                self.observers.finish(given_up=lambda: self.stop_order.late)
                self._draw(view, at_end=True)
            finally:
                self._has_waiter = False
        return self._conclude()

    def show(self, view: View) -> None:
        """Show the run until its end; an interrupt is raised, and the run goes on."""
        self._show_until_ended(view)
        self._draw(view, at_end=True)

    def all_none(self) -> Results:
        """Return the results of a cell's run whose ranks have all returned None, in which case `wait` and `result`
        return None."""
        return self._named(Results(dict.fromkeys(self.record.ranks)))

    def _named(self, results: Results) -> Results:
        results.run = self.id
        return results

    def _show_until_ended(self, view: View | None) -> None:
        if view is None:
            self.wait_ended(None)
            return
        if not hasattr(view, "wait_for_news"):  # as an observer it would end the thread that reads the pool's events
            raise TypeError(f"wait() has no timeout: use result(timeout={view!r}); the run continues if it expires")
        self.observers.add(view)
        self._draw(view)
        while not self.done():
            view.wait_for_news()
            self._draw(view)
            if self.record.in_debugger:
                from jupyter_distrib.kernel.session.runs import debug_prompt

                debug_prompt.converse(self, meanwhile=lambda: self._draw(view))

    def _draw(self, view: View | None, *, at_end: bool = False) -> None:
        """Draw the view; draw an ended record only when nothing more will be added to it. Without the view, as when no
        file descriptor is left or the output of a rank cannot be drawn, the cell goes on."""
        if view is None or not self._is_drawn:
            return
        with self._lock:
            if not at_end and self.record.ended:
                return
            try:
                view.draw(self.record, self.elapsed_s)
            except OSError as error:
                if not open_files.advice_on(error):
                    raise
            except Exception as error:  # noqa: BLE001 - the output may be anything
                self._is_drawn = False
                shown = f"{type(error).__name__}: {error}"
                print(f"The view of {self.record.label} ends here, and the cell goes on: {shown}", file=sys.stderr)

    def note(self, text: str) -> None:
        """Add a sentence to the output of the run; from any thread."""
        self.deliver(m.Noted(run=self.id, rank=None, text=text))

    def _pressed(self) -> None:
        self.stop_order.give(force=self.interrupted, late=self.done())

    def deliver(self, event: m.RunEvent, descriptors: Descriptors = NO_DESCRIPTORS) -> None:
        """Fold one event into the record; called in the node's thread. Owns the descriptors."""
        event = self._worded(self._sources.named(self.values.keep_value(event, descriptors)))
        with self._lock:
            self._apply(event)
            if not isinstance(event, m.Ended):
                self.observers.notify(event, self.record)
                return
        try:
            self._end()
        finally:
            with self._lock:
                self.observers.notify(event, self.record)
            self.clock.shown.set()

    def _apply(self, event: m.RunEvent) -> None:
        """Apply an event to the record. What a rank prints or displays may be anything, and may cost no more than its
        place in the view: an error here would lose the ranks."""
        try:
            self.record.apply(event)
        except Exception as error:
            if not isinstance(event, (m.Wrote, m.Displayed)):
                raise
            text = (
                f"some of its output cannot be shown ({type(error).__name__}: {error}); its log has all that it printed"
            )
            noted = m.Noted(run=self.id, rank=event.rank, text=text)
            if noted not in self.record.notes:
                self.record.apply(noted)

    def _worded(self, event: m.RunEvent) -> m.RunEvent:
        """Return the event with advice on options in the words of the caller that began the run."""
        if isinstance(event, m.Noted):
            return replace(event, text=self._in_words(event.text))
        if isinstance(event, m.Failed) and event.failure.notes:
            notes = tuple(self._in_words(note) for note in event.failure.notes)
            return replace(event, failure=replace(event.failure, notes=notes))
        return event

    def _end(self) -> None:
        self.clock.stop()
        calls, self.on_ended = self.on_ended, []  # so that what the callbacks hold is released
        try:
            for call in calls:
                call()
        finally:
            self.clock.ended.set()

    def _conclude(self) -> Any:
        """Return the results of a successful run, else raise its exception, outside any `except` block."""
        if self.refusal is not None:
            raise self.refusal
        if self._is_cancelled:
            label = self.record.label
            raise RunCancelled(
                f"{label} was cancelled before it began, so there is no result: submit it again to have one."
            )
        returned = [rank for rank, state in self.record.ranks.items() if state.returned]
        succeeded = self.record.ok and not self.interrupted
        try:
            imports = nullcontext() if succeeded and self.values.are_none else interrupts.WholeImports()
            with imports:
                results = self.values.unpacked(returned, keep=self.concurrent)
                exception = None if succeeded else self._exception()
        except OSError as error:
            open_files.raise_if_full(error)
            raise
        except KeyboardInterrupt:
            results = Results({})
            exception = failures.to_interrupt(self.record, self.elapsed_s, self._sources.source_of)
        if exception is None:
            self.values.held = ()
            self._named(results)
            self._seen = weakref.ref(results)
            return results if self.of_function or any(value is not None for value in results) else None
        with suppress(AttributeError, TypeError):
            failures.add_attributes(exception, results=results)
        raise exception

    def _exception(self) -> BaseException:
        record, elapsed_s = self.record, self.elapsed_s
        source_of = self._sources.source_of
        if self.interrupted:
            return failures.to_interrupt(record, elapsed_s, source_of)
        if record.limit_s is not None:
            return failures.to_timeout(record, record.limit_s, elapsed_s, source_of, self._in_words)
        if failures.cause(record) is None and any(rank.state == "interrupted" for rank in record.ranks.values()):
            return failures.to_interrupt(record, elapsed_s, source_of)  # stopped from elsewhere, or in the inline pool
        as_group = handlers.may_catch()
        return failures.to_exception(record, unpack_exception, source_of, elapsed_s, bold=True, as_group=as_group)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Run cannot be pickled: pickle run.result() or other values that you read from it")

    def __repr__(self) -> str:
        if self.start.state:
            where = f" (place {self.place})" if self.place else ""
            return f"Run {self.id} of {self.record.label}: {self.state}{where}"
        states = [rank.state for rank in self.record.ranks.values()]
        counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        return f"Run {self.id} of {self.record.label}: {counts}, {formatting.duration(self.elapsed_s)}"


# ---------------------------------------------------------------------------------------------------- parts of a run


class RunStart:
    """The start of one run."""

    def __init__(self) -> None:
        self.state = ""
        """The state before it runs: `queued` or `starting`; empty once its ranks have their order."""
        self.place = 0
        """The place in the queue, counted from 1; 0 if it is not queued."""
        self.refusal: BaseException | None = None
        """The error with which the run was refused before it had ranks."""
        self._decided = threading.Event()
        """An event that is cleared while a submitted run is on its way to its ranks and does not wait for others."""
        self._decided.set()

    def move_on(self, state: str, place: int) -> None:
        if not self.state:
            self._decided.clear()
        self.state, self.place = state, place

    def begin(self) -> None:
        self.state, self.place = "", 0

    def wake_waiting(self) -> None:
        """Wake the waiting thread: the cell was sent, queued behind others, or refused."""
        self._decided.set()

    def refuse(self, refusal: BaseException | None) -> None:
        self.refusal, self.place = refusal, 0

    def wait(self) -> None:
        """Wait while the run is starting. Raises the error with which it was refused."""
        while self.state != "queued" and not interrupts.wait(self._decided, interrupts.HEAR_S):
            continue
        if self.refusal is not None:
            raise self.refusal


class RunClock:
    """The clock of one run, from its start, `age_s` ago, to its end."""

    def __init__(self, age_s: float = 0.0) -> None:
        self.began_at_s = time.time() - age_s
        """Start time in seconds since the epoch."""
        self.ended = threading.Event()
        """An event that is set when nothing of the run is left to do."""
        self.shown = threading.Event()
        """An event that is set when the observers have shown the end, too."""
        self._began_s = time.monotonic() - age_s
        self._stopped_s: float | None = None

    @property
    def elapsed_s(self) -> float:
        return (self._stopped_s or time.monotonic()) - self._began_s

    def restart(self) -> None:
        """Restart the clock for a run that was queued until now."""
        self.began_at_s, self._began_s = time.time(), time.monotonic()

    def stop(self) -> None:
        self._stopped_s = time.monotonic()


class StopOrder:
    """The user's requests to stop one run."""

    def __init__(self, link: PoolLink) -> None:
        self._link = link
        self.asked_at_s: float | None = None
        """Time of the first request in seconds since the epoch; None if there was none."""
        self.kill_asked = False
        self._killed_at_s: float | None = None
        """Time of the first order to kill, by `time.monotonic`."""
        self.late = False
        """Whether a request came after the end of the run."""

    def give(self, *, force: bool, late: bool = False) -> None:
        self.asked_at_s = self.asked_at_s or time.time()
        self.kill_asked, self.late = self.kill_asked or force, self.late or late
        now_s = time.monotonic()
        if self._killed_at_s is not None and now_s - self._killed_at_s >= _UNANSWERED_S and not late:
            # In a thread: a signal handler may have interrupted code that holds a lock needed here.
            threading.Thread(target=self._link.abandon, name="jupyter_distrib-abandon", daemon=True).start()
        elif force:
            self._killed_at_s = self._killed_at_s or now_s
        self._link.stop(force)

    def redirect(self, link: PoolLink) -> None:
        """Use this link from now on, and repeat an earlier request on it."""
        self._link = link
        if self.asked_at_s is not None:
            link.stop(self.kill_asked)

    def stage(self, now_s: float) -> str:
        """Return the stage of the stop at this time since the epoch: `asked`; `killed` once ranks that have not stopped
        are killed; empty without a request."""
        if self.asked_at_s is None:
            return ""
        return "killed" if self.kill_asked or now_s >= self.asked_at_s + m.KILL_AFTER_S else "asked"
