"""The queue of submitted runs, for which the notebook does not wait.

    submit --> queued (place n) --> starting --> running

Runs of one pool begin in the order in which they were submitted, as many at once as the pool has room for. A run that
fails does not hold up the next one. Nothing here waits: submitting a run, or ending one, lets others begin, each in a
thread of its own, because a beginning may have to wait for processes and GPUs. The queue is the kernel's, and ends
with it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from jupyter_distrib.errors import PoolError
from jupyter_distrib.kernel.session.runs.observers import EndObserver
from jupyter_distrib.kernel.session.runs.run import Run
from jupyter_distrib.kernel.settings.cell_options import GroupSize
from jupyter_distrib.system.data_class import data_class


@data_class
class Capacity:
    """The number of ranks that a pool has room for at once."""

    gpus: int
    cpus: int

    def ranks(self, size: GroupSize) -> int:
        """Return the number of ranks that a run of this size needs."""
        return size.least or size.ranks(self.gpus)

    def on_gpus(self, size: GroupSize) -> bool:
        return size.gpus and self.gpus > 0

    def all_for(self, size: GroupSize) -> int:
        """Return the capacity for the kind of device that a run of this size uses."""
        return self.gpus if self.on_gpus(size) else self.cpus


@dataclass(slots=True, kw_only=True, eq=False)
class Submission:
    """A run in the queue, until its end."""

    run: Run
    pool: str
    """The pool that it is queued for."""
    pool_options: Mapping[str, str] = field(default_factory=dict)
    size: GroupSize
    start: Callable[[bool], object]
    """Begins the run, in a thread of its own; with True, waits for busy ranks and GPUs as long as necessary."""
    drop: Callable[[], object]
    """Frees the data that the run would have sent."""


@dataclass(slots=True, kw_only=True)
class PoolQueue:
    """The submitted runs of one pool."""

    waiting: deque[Submission] = field(default_factory=deque)
    begun: list[Submission] = field(default_factory=list)
    """The runs that are starting or running."""
    capacity: Capacity | None = None
    """The capacity; None until the pool has been asked, and only one run at a time until then."""

    def has_room(self, size: GroupSize) -> bool:
        if not self.begun:
            return True
        if (capacity := self.capacity) is None:
            return False
        on_gpus = capacity.on_gpus(size)
        taken = sum(capacity.ranks(each.size) for each in self.begun if capacity.on_gpus(each.size) == on_gpus)
        return taken + capacity.ranks(size) <= capacity.all_for(size)


class RunQueue:
    """The queue of one kernel.

    Args:
        capacity_of: Returns what a pool has room for, by its name and the options with which the run reaches it, and
            may ask it; in a thread that starts a run.
        on_change: Called when the place or state of a run has changed; from any thread.
        on_waiting: Called with the runs that are queued or starting, when these have changed; from any thread.
    """

    def __init__(
        self,
        capacity_of: Callable[[str, Mapping[str, str]], Capacity],
        on_change: Callable[[], object],
        on_waiting: Callable[[Sequence[Submission]], object] = lambda waiting: None,
    ) -> None:
        self._capacity_of, self._on_change, self._on_waiting = capacity_of, on_change, on_waiting
        self._reported: list[tuple[str, int]] = []
        self._pools: dict[str, PoolQueue] = {}
        self._lock = threading.RLock()

    def submit(self, submission: Submission, *, here: bool = False) -> None:
        """Put a run at the end of its pool's queue; it begins at once if there is room. With `here`, this thread begins
        it, and waits for no ranks or GPUs that others use."""
        run = submission.run
        run.stop_by(lambda force: self._cancel(submission))
        run.observers.add(EndObserver(lambda: self._release(submission)))
        with self._lock:
            self._pools.setdefault(submission.pool, PoolQueue()).waiting.append(submission)
        self._advance(submission.pool, submission if here else None)

    def move_up(self, run: Run) -> None:
        """Let a queued run begin before the one in front of it.

        Raises:
            PoolError: It is not queued, or the first one.
        """
        with self._lock:
            found = [
                (each, place)
                for pool in self._pools.values()
                for place, each in enumerate(pool.waiting)
                if each.run is run
            ]
            if not found:
                raise PoolError(f"run {run.id} is not queued: it is {run.state}.")
            ((submission, place),) = found
            if place == 0:
                raise PoolError(f"run {run.id} is the next one already.")
            waiting = self._pools[submission.pool].waiting
            waiting[place - 1], waiting[place] = submission, waiting[place - 1]
        self._advance(submission.pool)

    def close(self) -> None:
        """End all runs that have not started."""
        with self._lock:
            waiting = [each for pool in self._pools.values() for each in pool.waiting]
            for pool in self._pools.values():
                pool.waiting.clear()
        for each in waiting:
            each.drop()
            each.run.end_unplaced(PoolError("the run was still queued when the extension was unloaded."))

    def _advance(self, pool_name: str, here: Submission | None = None) -> None:
        """Start the first runs of the pool's queue, as many as there is capacity for, and number the others."""
        beginning = []
        with self._lock:
            pool = self._pools[pool_name]
            while pool.waiting and pool.has_room(pool.waiting[0].size):
                first = pool.waiting.popleft()
                pool.begun.append(first)
                first.run.move_on("starting", "starting")
                beginning.append(first)
            for place, each in enumerate(pool.waiting, 1):
                each.run.move_on("queued", f"queued, place {place} of {len(pool.waiting)}", place)
            self._report_changes()
        for each in beginning:
            if each is not here:
                name = f"jupyter_distrib-{each.run.id}"
                threading.Thread(target=self._start, args=(each,), name=name, daemon=True).start()
        self._on_change()
        if here is not None and here in beginning:
            self._start(here, here=True)

    def _report_changes(self) -> None:
        told, waiting = dict(self._reported), []
        for pool in self._pools.values():
            starting = [each for each in pool.begun if each.run.state == "starting"]
            # without a run that begins at once
            waiting += [each for each in starting if pool.waiting or each.run.id in told]
            waiting += pool.waiting
        places = [(each.run.id, each.run.place) for each in waiting]
        if places != self._reported:
            self._reported = places
            self._on_waiting(waiting)

    def _start(self, submission: Submission, *, here: bool = False) -> None:
        run = submission.run
        try:
            capacity = self._learn_capacity(submission.pool, submission.pool_options)
            submission.start(not here and capacity.ranks(submission.size) <= capacity.all_for(submission.size))
            run.start.wake_waiting()
        except BaseException as error:  # noqa: BLE001 - `result()` raises it
            if not run.done():
                submission.drop()
                run.end_unplaced(None if run.interrupted else error)

    def _learn_capacity(self, name: str, options: Mapping[str, str]) -> Capacity:
        pool = self._pools[name]
        if pool.capacity is None:
            pool.capacity = self._capacity_of(name, options)
            self._advance(name)
        return pool.capacity

    def _cancel(self, submission: Submission) -> None:
        """End a run that is still queued; a run that is starting ends once it has started."""
        with self._lock:
            pool = self._pools[submission.pool]
            if submission not in pool.waiting:
                return
            pool.waiting.remove(submission)
        submission.drop()
        submission.run.end_unplaced(None)

    def _release(self, submission: Submission) -> None:
        submission.start, submission.drop = lambda patient: None, lambda: None  # the notebook may keep the run for long
        with self._lock:
            pool = self._pools[submission.pool]
            if submission in pool.begun:
                pool.begun.remove(submission)
            if not pool.begun and not pool.waiting:
                pool.capacity = None  # nodes may come and go meanwhile
        self._advance(submission.pool)
