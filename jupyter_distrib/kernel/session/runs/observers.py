"""The observers of runs, and the protection of runs from observers of other packages.

    Run.deliver --> RunRecord.apply --> RunObservers.notify --+--> LiveView          wakes the waiting thread
                                                              +--> SidebarObserver   wakes the thread that sends news
                                                              +--> ObserverThread    a queue, and a thread of its own

`notify` is called in the pool's own thread, under the lock of the run, so an observer of this package returns at once.
An observer of another package is called in a thread of its own, with a record of its own, which folds the same events.
If it raises, falls behind or hangs, it is dropped with a note, and the run goes on. Nobody waits for a tracker
that `ends_in_background`.
"""

from __future__ import annotations

import atexit
import copy
import importlib.metadata
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

from jupyter_distrib.addresses import without_secrets
from jupyter_distrib.kernel import trackers
from jupyter_distrib.kernel.record.observer import Follow, ObservedRun, Observer
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.kernel.settings.cell_options import Options
from jupyter_distrib.system import entry_points, interrupts
from jupyter_distrib.wire import messages as m

ENTRY_POINTS = "jupyter_distrib.observers"
BEGIN_S = 2.0
"""Maximum seconds that a cell waits for the `begin` of all its observers together."""
FINISH_S = 2.0
"""Maximum seconds that the end of a cell waits until its observers have handled all events."""
HANGS_S = 10.0
"""Maximum seconds for one call of an observer that `ends_in_background`, after which later runs do without it."""
QUIET_S = 1.0
"""Maximum seconds of such a call that the end of a cell does not mention."""
EXIT_S = 4.0
"""Maximum seconds that kernel shutdown waits for such observers: programs that execute notebooks kill a kernel after
5."""
MOST_BEHIND = 200
"""Maximum number of runs that may wait for one such observer."""
BACKLOG_BYTES = 32_000_000
"""Maximum size of the events that may wait for one observer."""
PROFILE = "profile"
"""The option whose traces are written by an observer of this package, too slow for the pool's thread."""
EVENT_BYTES = 1000
"""Minimum size that counts for an event."""


@dataclass(slots=True, eq=False)
class RunObservers:
    """The observers of one run."""

    facts: ObservedRun | None = None
    """The facts about the run; None while it waits for its turn or for ranks."""
    trackers: tuple[str, ...] = ()
    """The experiment trackers that record the run."""
    own: tuple[Observer, ...] = ()
    """The observers that return at once."""
    threads: tuple[ObserverThread, ...] = ()
    """The observers that have a thread of their own."""

    def add(self, *observers: Observer) -> None:
        self.own = (*self.own, *observers)

    def remove(self, observer: Observer) -> None:
        self.own = tuple(each for each in self.own if each is not observer)

    def add_thread(self, thread: ObserverThread) -> None:
        """Add an observer with a thread of its own."""
        self.threads = (*self.threads, thread)
        if thread.is_tracker:
            self.trackers = (*self.trackers, thread.name)

    def notify(self, event: m.RunEvent, record: RunRecord) -> None:
        """Pass an event, just folded into the record, to all observers. Returns at once."""
        for observer in (*self.threads, *self.own):  # a queue does not fail
            observer.observe(event, record)

    @property
    def unfinished(self) -> bool:
        """Return whether some observer continues in the background."""
        return any(thread.is_behind for thread in self.threads)

    def finish(self, given_up: Callable[[], bool]) -> None:
        """Wait, for a bounded time, until observers with a thread of their own have handled the end of the run."""
        until_s = time.monotonic() + FINISH_S
        for thread in self.threads:
            thread.finish(until_s, given_up)


class Followed(Protocol):
    """The part of a run that its observers use."""

    record: RunRecord
    observers: RunObservers
    link: Any
    clock: Any
    detached: bool

    def note(self, text: str) -> None: ...

    def done(self) -> bool: ...


class Requested(Protocol):
    """The part of a requested cell that its observers use."""

    @property
    def cell(self) -> m.Cell: ...

    @property
    def shown(self) -> str: ...

    @property
    def uses(self) -> Mapping[str, object]: ...

    @property
    def arguments(self) -> Mapping[str, object]: ...


def _facts(
    run: Followed,
    request: Requested | None,
    options: Options | None,
    *,
    track: tuple[str, ...],
    context: Mapping[str, object] | None,
    predicted: Mapping[int, int] | None,
) -> ObservedRun:
    record = run.record
    return ObservedRun(
        id=record.run,
        label=record.label,
        source=(request.shown or request.cell.source) if request is not None else "",
        options=({"track": track} if track else {}) if options is None else options.given(),
        strategy=record.strategy,
        pool=run.link.pool,
        ranks=tuple(record.ranks),
        world_size=record.world_size,
        gpus=record.gpus,
        detached=run.detached,
        attached=request is None,
        began_at_s=run.clock.began_at_s,
        note=run.note,
        context=context or {},
        uses=request.uses if request is not None else {},
        arguments=request.arguments if request is not None else {},
        predicted_bytes=(predicted or {}).get(record.world_size),
    )


@contextmanager
def reporting_a_failed_start(run: Followed) -> Iterator[None]:
    """Report the end of the run to its observers if an exception keeps the cell from being sent."""
    try:
        yield
    except BaseException:
        if not run.done():
            run.observers.notify(m.Ended(run=run.record.run, at_s=time.monotonic()), run.record)
        raise


class Observers:
    """All observers that may follow the runs of this kernel: our own, and those of other packages."""

    def __init__(self) -> None:
        self.own: list[Follow] = []
        """Functions called in the thread that begins a run; each call of their observers returns at once. `begin` is
        not called."""
        self._hung: dict[str, ObserverThread] = {}
        """Observers that have hung in an earlier run, by name."""
        self._behind: list[ObserverThread] = []
        """Observers that end in the background and may not have finished."""
        atexit.register(self._flush)

    def follow(
        self,
        run: Followed,
        request: Requested | None = None,
        options: Options | None = None,
        *,
        track: tuple[str, ...] = (),
        context: Mapping[str, object] | None = None,
        predicted: Mapping[int, int] | None = None,
    ) -> dict[str, str]:
        """Add the observers of a run that begins or is attached. Return environment variables for its ranks.

        Args:
            run: The run.
            request: The cell; None for an attached run.
            options: Its options; None for an attached run.
            track: The trackers that an attached run writes to.
            context: The trackers' state in the thread that submitted the run.
            predicted: The peak of tensors on each GPU by a dry run of the cell, by number of ranks.
        """
        facts = run.observers.facts = _facts(run, request, options, track=track, context=context, predicted=predicted)
        tracking = trackers.wanted(facts.trackers, facts.uses, attached=facts.attached)
        for follow in self.own:
            if (observer := follow(facts)) is not None:
                run.observers.own = (*run.observers.own, observer)
        tracking += [PROFILE] if facts.attached or PROFILE in facts.options else []
        if not (tracking or _entry_points() or self._behind):
            return {}
        names = [*_entry_points(), *(name for name in tracking if name not in _entry_points())]
        given: list[Mapping[str, str]] = []
        threads = []
        for name in names:
            if (thread := self._thread(name, facts, run.record, given.append)) is not None:
                threads.append(thread)
        for thread in threads:
            run.observers.add_thread(thread)
            thread.start()
        until_s = time.monotonic() + BEGIN_S
        given += [{} if facts.attached else thread.environment(until_s) for thread in threads]
        self._behind = [each for each in (*self._behind, *threads) if each.is_behind]
        return {name: value for each in given for name, value in each.items()}

    def _thread(
        self, name: str, run: ObservedRun, record: RunRecord, give: Callable[[Mapping[str, str]], object]
    ) -> ObserverThread | None:
        """Return the thread of an observer, not yet started; None if it does not follow the run. `give` is then called
        with variables for its ranks."""
        hung = self._hung.get(name)
        behind = [thread for thread in self._behind if thread.name == name and thread.is_behind]
        is_hung = (hung is not None and hung.hangs) or any(thread.hangs for thread in behind)
        if is_hung or len(behind) >= MOST_BEHIND:
            run.note(f"The observer {name} does not follow this run: it is still hanging in an earlier one.")
            give(trackers.unrecorded(name, run))
            return None
        make: Callable[[], Observer | None] = lambda: _follow_of(name)(run)  # noqa: E731
        if not run.attached:  # the pool's own thread, in which a run is attached, must not wait for foreign code
            try:
                observer = make()
            except Exception as error:  # noqa: BLE001 - foreign code
                run.note(_dropped(name, _reason(error)))
                give(trackers.unrecorded(name, run))
                return None
            if observer is None:
                return None
            make = lambda: observer  # noqa: E731
        return ObserverThread(name, run, make, record, on_hung=self._hung.update)

    def _flush(self) -> None:
        """Wait, for a bounded time, until the observers have sent what is left when the kernel ends."""
        until_s = time.monotonic() + EXIT_S
        for thread in self._behind:
            thread.join(max(0.0, until_s - time.monotonic()))


class ObserverThread(Observer):
    """One observer of another package, which follows one run in a thread of its own.

    Args:
        name: The name of its entry point.
        run: The run.
        make: Returns the observer, or None if it does not follow this run; called in the observer's thread.
        record: The record of the run, fresh.
        on_hung: Called with a mapping from the observer's name to this thread, if the observer hangs.
    """

    def __init__(
        self,
        name: str,
        run: ObservedRun,
        make: Callable[[], Observer | None],
        record: RunRecord,
        *,
        on_hung: Callable[[Mapping[str, ObserverThread]], object],
    ) -> None:
        self.name = name
        self.is_tracker = name != PROFILE and name not in _entry_points()
        self._note, self._make, self._on_hung = run.note, make, on_hung
        self._record = copy.deepcopy(record)
        self._backlog = Backlog()
        self._environment: dict[str, str] = {}
        self._ends_in_background = self.is_tracker
        """Known once the observer is made; a tracker whose library is still being imported is not dropped for it."""
        self._called_at_s = math.inf
        """Time at which the current call of the observer began; None outside a call."""
        self._begun, self._finished = threading.Event(), threading.Event()
        self._dropped = threading.Lock()
        """A lock that the thread dropping the observer acquires and never releases; that thread then adds the note."""
        self._thread = threading.Thread(target=self._follow, name=f"jupyter_distrib-observer-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def hangs(self) -> bool:
        """Return whether it was dropped, or has exceeded the time for one call and has not returned."""
        late = self._dropped.locked() or time.monotonic() > self._called_at_s + HANGS_S
        return late and self._thread.is_alive()

    @property
    def is_behind(self) -> bool:
        """Return whether it continues in the background."""
        return self._ends_in_background and not self._finished.is_set() and not self._dropped.locked()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def environment(self, until_s: float) -> dict[str, str]:
        """Return the variables from the observer's `begin`; drop the observer if it has not returned by `until_s`."""
        if not interrupts.wait(self._begun, max(0.0, until_s - time.monotonic())):
            self._hang(f"its begin() has not returned within {BEGIN_S:g} s")
        return self._environment

    def observe(self, event: m.RunEvent, record: RunRecord) -> None:
        if self._finished.is_set() or self._dropped.locked():
            return
        if not self._backlog.put(event) and self._dropped.acquire(blocking=False):
            # In a thread, because the caller holds the lock of the run, which a note needs.
            why = "it has fallen too far behind the events"
            threading.Thread(target=self._say_hung, args=(why,), name=self._thread.name, daemon=True).start()

    def finish(self, until_s: float, given_up: Callable[[], bool]) -> None:
        """Wait until the observer has handled the last event, was dropped, or the user no longer wants to wait. Does
        not wait for a tracker that ends in the background."""
        if self.is_tracker and self.is_behind:
            if time.monotonic() > self._called_at_s + QUIET_S:
                self._note(f"{self.name} has not answered yet: it receives this run in the background")
            return None
        while not (self._finished.is_set() or self._dropped.locked() or given_up()):
            left_s = until_s - time.monotonic()
            if left_s <= 0 and self._ends_in_background:
                return None
            if left_s <= 0:
                return self._hang(f"it has not handled the end of the run within {FINISH_S:g} s")
            interrupts.wait(self._finished, min(left_s, interrupts.HEAR_S))

    def _follow(self) -> None:
        try:
            if (observer := self._make()) is not None:
                self._ends_in_background = observer.ends_in_background
                self._environment = {str(name): str(value) for name, value in observer.begin().items()}
                self._begun.set()
                self._pass_on(observer)
        except BaseException as error:  # noqa: BLE001 - foreign code, which may also call sys.exit()
            self._drop(_reason(error))
        finally:
            self._begun.set()
            self._finished.set()

    def _pass_on(self, observer: Observer) -> None:
        while not self._dropped.locked() and (event := self._backlog.get()) is not None:
            self._record.apply(event)
            self._called_at_s = time.monotonic()
            observer.observe(event, self._record)
            self._called_at_s = math.inf
            if isinstance(event, m.Ended):
                return

    def _drop(self, why: str) -> None:
        """Pass no more events to the observer, and add one note on this."""
        if self._dropped.acquire(blocking=False):
            self._note(_dropped(self.name, why))

    def _hang(self, why: str) -> None:
        if self._dropped.acquire(blocking=False):
            self._say_hung(why)

    def _say_hung(self, why: str) -> None:
        self._backlog.close()
        self._on_hung({self.name: self})
        self._note(_dropped(self.name, why))


class Backlog:
    """The queue of events for one observer: filled by one thread at a time, emptied by another."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[m.RunEvent | None] = queue.SimpleQueue()
        self._put_bytes = self._taken_bytes = 0

    def put(self, event: m.RunEvent) -> bool:
        """Add an event unless too many bytes wait already. Return whether it was added."""
        self._put_bytes += _size_bytes(event)
        if self._put_bytes - self._taken_bytes > BACKLOG_BYTES:
            return False
        self._events.put(event)
        return True

    def get(self) -> m.RunEvent | None:
        """Wait for the next event and return it; None if the backlog was closed."""
        if (event := self._events.get()) is not None:
            self._taken_bytes += _size_bytes(event)
        return event

    def close(self) -> None:
        """Wake the thread that waits in `get`."""
        self._events.put(None)


def _size_bytes(event: m.RunEvent) -> int:
    match event:
        case m.Wrote():
            return EVENT_BYTES + len(event.text)
        case m.Displayed():
            return EVENT_BYTES + sum(map(len, event.data.values()))
        case _:
            return EVENT_BYTES


@cache
def _entry_points() -> Mapping[str, importlib.metadata.EntryPoint]:
    return {entry.name: entry for entry in entry_points.of_group(ENTRY_POINTS)}


@cache
def _follow_of(name: str) -> Follow:
    if name == PROFILE:
        from jupyter_distrib.kernel.session.runs import trace_writer

        return trace_writer.follow
    follow: Follow = _entry_points()[name].load() if name in _entry_points() else trackers.load(name)
    return follow


def _reason(error: BaseException) -> str:
    return without_secrets(f"{type(error).__name__}: {error}")


def _dropped(name: str, why: str) -> str:
    return f"The observer {name} was dropped: {why}. The run is not affected."


class EndObserver(Observer):
    """An observer that calls a function at the end of a run, when nothing is left to do."""

    def __init__(self, ended: Callable[[], object]) -> None:
        self._ended = ended

    def observe(self, event: m.RunEvent, record: RunRecord) -> None:
        if isinstance(event, m.Ended):
            self._ended()
