"""The session of one kernel: the runs on its ranks. One instance per process (`current`); it has a pool manager, which
holds the ranks (`kernel/session/pools/pool_manager.py`), and the choices that were made in this notebook.

Called from the thread that runs the cell; events of a pool arrive in that pool's own thread
(`kernel/session/pools/connection.py`)."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import Any

from jupyter_distrib.errors import PayloadError, PoolError
from jupyter_distrib.kernel import trackers
from jupyter_distrib.kernel.capture.capture import Dropped
from jupyter_distrib.kernel.capture.module_changes import ModuleChanges
from jupyter_distrib.kernel.history.writer import HistoryWriter
from jupyter_distrib.kernel.record.observer import ObservedRun
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.kernel.session import cell_order, new_runs
from jupyter_distrib.kernel.session.cell_order import CellRequest, Order, Outgoing, ProcessState
from jupyter_distrib.kernel.session.handles import KeptValues
from jupyter_distrib.kernel.session.notifier import Notifier
from jupyter_distrib.kernel.session.pools.connection import GroupState, WorkerGroup
from jupyter_distrib.kernel.session.pools.kernel_identity import KernelIdentity
from jupyter_distrib.kernel.session.pools.pool_manager import (
    PATIENCE_S,
    ConcurrentStart,
    PoolManager,
    RankStart,
    StartCut,
    once_more,
)
from jupyter_distrib.kernel.session.predicted_peaks import PredictedPeaks
from jupyter_distrib.kernel.session.rank_queries import RankQueries
from jupyter_distrib.kernel.session.runs.observers import Observers, reporting_a_failed_start
from jupyter_distrib.kernel.session.runs.results import RankValue
from jupyter_distrib.kernel.session.runs.run import Run, View
from jupyter_distrib.kernel.session.runs.run_history import RunHistory
from jupyter_distrib.kernel.session.runs.run_queue import RunQueue, Submission
from jupyter_distrib.kernel.session.setups import Setups
from jupyter_distrib.kernel.settings.cell_options import Options
from jupyter_distrib.kernel.settings.choices import Choices
from jupyter_distrib.kernel.settings.settings import BUILT_IN, CellOptions, NamedPool, Settings
from jupyter_distrib.pools.base import capabilities_of, usable_kinds
from jupyter_distrib.serialization import payload
from jupyter_distrib.serialization.value_cache import ValueCache
from jupyter_distrib.system import interrupts, open_files, paths, queue_list
from jupyter_distrib.system.queue_list import QueuedRun
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.descriptors import NO_DESCRIPTORS

STOPPED_S = 5.0
"""Maximum seconds to wait for the end of a run whose cell could not be sent completely."""


class Session:
    """The session of this kernel: its ranks, and the runs on them."""

    def __init__(self) -> None:
        self.identity = KernelIdentity()
        self.choices = Choices()
        self.sent_values = ValueCache()
        self.pools = PoolManager(self.identity, self.choices, self.changed)
        self.on_change: Callable[[], object] | None = None
        """Called when worker groups or runs have come, changed or gone; from any thread. None if nobody looks."""
        self.runs = RunHistory()
        self.setups = Setups()
        self.predicted_peaks = PredictedPeaks()
        self.module_changes = ModuleChanges()
        self.dropped: dict[str, Dropped] = {}
        """The names that a distributed cell defined on the ranks only."""
        self.observers = Observers()
        self.history_writer = HistoryWriter(self._save)
        self.observers.own.append(self.history_writer.follow)
        self.notifier = Notifier(lambda: self.identity.notebook)
        self.queue = RunQueue(self.pools.capacity, self.changed, self._list_queued)
        self._ids = map(f"{self.identity.name}-{{}}".format, itertools.count(1))
        """The ids of the next runs."""
        self.queries = RankQueries(self.start, self.choices, self.runs, self.pools)
        self._kept_values = KeptValues(self.queries.fetch)

    @property
    def settings(self) -> Settings:
        """The pools and defaults as they are now. Raises `OptionsError` for a file with an error."""
        return self.choices.settings

    def usable_pools(self, settings: Settings) -> list[NamedPool]:
        """Return the pools to choose from: all that somebody has defined, and the built-in ones that can be reached."""
        held = {connection.facts.pool for connection in self.pools.connections if connection.groups}
        held |= {settings.pool, *(start.pool for start in self.pools.starts)}
        usable = usable_kinds()
        return [
            pool
            for name, pool in settings.pools.items()
            if pool.origin != BUILT_IN or name in held or pool.kind in usable
        ]

    @property
    def history(self) -> tuple[Run, ...]:
        """The last runs, oldest first, and all that are in progress."""
        return self.runs.all

    def changed(self) -> None:
        if not any(connection.groups for connection in list(self.pools.connections)):
            self.sent_values.clear()  # no ranks hold them any more
        if (on_change := self.on_change) is not None:  # which another thread may set to None
            on_change()

    def start(self, request: CellRequest) -> Run:
        """Send the cell to its ranks. Returns as soon as the order is sent.

        Raises:
            PoolError, CaptureError, ValueLost: Nothing was started.
        """
        try:
            return self._begin(self._order(request))
        except PoolError as error:
            error.args = tuple(request.in_words(str(each)) for each in error.args)
            raise

    def submit(self, request: CellRequest, *, here: bool = False) -> Run:
        """Queue the cell, which then runs without the notebook waiting for it, and return its run at once."""
        order = self._order(request)
        filled = order.options.filled
        capabilities = capabilities_of(self.settings.pools[filled.pool or ""].kind)
        if capabilities.runs_in_send:
            return self._begin(order)
        order = order.as_it_is_now(self.sent_values)
        run = new_runs.queued(order, next(self._ids))
        self._remember(run)

        def begin(patient: bool) -> None:
            wait_s = filled.wait_s or (PATIENCE_S if patient and not self._fallback(order) else 0.0)
            try:
                self._begin(order, run, ConcurrentStart(wait_s=wait_s, say=run.wait_for))
            except PoolError as error:
                error.args = tuple(request.in_words(str(each)) for each in error.args)
                raise

        self.queue.submit(
            Submission(
                run=run,
                pool=run.pool,
                pool_options=filled.pool_options,
                size=order.options.size,
                start=begin,
                drop=order.drop,
            ),
            here=here,
        )
        return run

    def _order(self, request: CellRequest) -> Order:
        """Return the order for a request, with the peak that a dry run has predicted.

        Raises:
            OptionsError, DistributedError: The strategy refuses the run, or a tracker is not installed.
        """
        settings = request.options.settings
        for text in self.choices.unannounced(settings) if settings.ignored else ():
            print(text)
        order = Order.of(request, self.setups.to_send())
        filled = order.options.filled
        if filled.track:
            trackers.check_installed(filled.track)
        if self.predicted_peaks.found:
            strategy, own = filled.strategy or "none", filled.strategy_options
            predicted = self.predicted_peaks.of(request.cell, request.inputs, strategy, own)
            order = replace(order, predicted=predicted)
        return order

    def reads_files(self, options: CellOptions) -> bool:
        """Return whether the ranks of a cell are sure to have the files of this machine."""
        pool = options.settings.pools[options.filled.pool or ""]
        return not (capabilities_of(pool.kind).remote or pool.fallback)

    def unchanged_bytes(self, packed: payload.Packed, options: Options) -> int:
        """Return how much of the inputs of a cell the machines of its ranks have already; `options` are complete."""
        if options.cache == 0:
            return 0
        _, views = payload.laid_out(packed)
        groups = self.pools.groups(options.pool)
        held = frozenset[str]().union(*(group.segments for group in groups))
        return sum(size for name, size in self.sent_values.known(views).items() if name in held)

    def _begin(self, order: Order, queued: Run | None = None, concurrent: ConcurrentStart | None = None) -> Run:
        """Begin the run on the cell's pool or, if that refuses, on its fallback."""
        try:
            return self._begin_on_ranks(order, queued, concurrent)
        except PoolError as error:
            fallback = self._fallback(order)
            if not fallback or (queued is not None and (queued.interrupted or not queued.start.state)):
                raise
            from jupyter_distrib.kernel.settings.available import for_strategy

            refused = f"on the pool {fallback}, since {order.options.filled.pool} refused: {error}"
            request = replace(order.request, notes=(*order.request.notes, refused))
        given = replace(order.request.options.given, pool=fallback, pool_options={})
        options = self.settings.completed(given)
        filled = for_strategy(options.filled, options.size)
        order = replace(order, request=request, options=replace(options, filled=filled, origins=""))
        patient = replace(concurrent, wait_s=PATIENCE_S) if concurrent else None
        return self._begin_on_ranks(order, queued, patient)

    def _begin_on_ranks(self, order: Order, queued: Run | None, concurrent: ConcurrentStart | None) -> Run:
        """Begin the run; a second time if the process that looks after its ranks ends while they start."""
        try:
            try:
                return self._begin_here(order, queued, concurrent)
            except StartCut:
                return once_more(lambda: self._begin_here(order, queued, concurrent))
        except OSError as error:
            open_files.raise_if_full(error)
            raise

    def _fallback(self, order: Order) -> str:
        """Return the fallback pool; empty for a cell that needs these particular ranks."""
        filled = order.options.filled
        pool = self.settings.pools.get(filled.pool or "")
        return "" if pool is None or order.request.handles or filled.on is not None else pool.fallback

    def _begin_here(self, order: Order, queued: Run | None, concurrent: ConcurrentStart | None) -> Run:
        """Claim ranks and send them the cell; a queued run becomes the run of it."""
        request, options, say = order.request, order.options.filled, concurrent.say if concurrent else print
        if not self._kept_values.dropped.empty():
            self.pass_on()
        takes_new = not (options.warm or request.handles) and options.on is None
        unused = takes_new and bool(request.cell.script or order.reason_for_new)
        start = RankStart(
            pool=options.pool or "", label=request.label, cell=request.cell_id, run=queued.id if queued else ""
        )
        claim = self.pools.claiming(order.options, start, request.handles, concurrent=concurrent, unused=unused)
        with claim as group:
            capabilities = group.connection.facts.capabilities
            for text in cell_order.without_effect(options, group.connection) if capabilities.ignored_options else ():
                (print if queued is None else queued.note)(text)
            outgoing = order.outgoing(self.sent_values)
            with closing(outgoing) if queued is None else nullcontext():
                if not (outgoing.in_parcel or capabilities.streams_content):
                    outgoing.fill()
                if queued is not None:
                    queued.stop_by(lambda force: self._give_up_starting(group))
                if group.state is not GroupState.OPEN or group.connection.versions.refusal:
                    self.pools.wait_open(group, say)
                if order.reason_for_new:
                    group.notes = (*group.notes, order.reason_for_new)
                run = new_runs.on_group(group, order, queued, run_id=queued.id if queued else next(self._ids))
                run.on_ended.append(lambda: self._after(group, run))
                if not outgoing.in_parcel:
                    run.on_ended.append(self.sent_values.tidy)
                run.values.held = request.inputs.sent
                if (on_ended := request.on_ended) is not None:
                    run.on_ended.append(lambda: on_ended(run))
                with reporting_a_failed_start(run):
                    if request.observed:
                        given = self.observers.follow(
                            run, request, options, context=order.context, predicted=order.predicted
                        )
                        options = cell_order.with_variables(options, given)
                        if queued is None and run.observers.threads:  # they may have chosen something in this process
                            order = replace(order, process_state=ProcessState.now())
                        facts, settings = run.observers.facts, order.options.settings
                        if facts is not None and settings.notify and not run.detached:
                            run.observers.add(self.notifier.of(facts, settings))
                    command = cell_order.command(order, options, outgoing.parcel, run, group)
                    self._send(run, group, command, outgoing)
        return run

    def _give_up_starting(self, group: WorkerGroup) -> None:
        """End ranks that are still starting, for a run that the user has stopped meanwhile."""
        if group.state is GroupState.OPENING:
            self.pools.close_group(group)

    def _save(self, runs: Sequence[tuple[ObservedRun, RunRecord]]) -> None:
        """Save runs in the history; called in the history's thread, which imports what no cell needs."""
        from jupyter_distrib.kernel.session import saved_runs

        saved_runs.save(runs, self.choices.last_settings, self.identity.notebook)

    def run_elsewhere(self, make: Callable[[str], Run]) -> Run:
        """Return a run of this notebook that no pool executes; `make` makes it for an id."""
        run = make(next(self._ids))
        self._remember(run)
        return run

    def _send(self, run: Run, group: WorkerGroup, command: m.Execute, outgoing: Outgoing) -> None:
        """Send the command with its inputs. Once ranks may have received part of it, an interrupt cancels the run."""
        connection = group.connection
        capabilities = connection.facts.capabilities
        guard = interrupts.Uninterrupted(run.cancel)
        try:
            with nullcontext() if capabilities.runs_in_send else guard:
                descriptors = NO_DESCRIPTORS if outgoing.in_parcel else outgoing.descriptors()
                group.run = run
                if run not in self.runs.all:
                    self.runs.add(run)
                    if (on_change := self.on_change) is not None:
                        on_change()
                connection.add_run(run)
                connection.node.send(command, descriptors)
                run.sent()
                outgoing.fill(given_up=lambda: guard.pressed or run.interrupted)
                sent = command.inputs
                group.segments = group.segments.union(sent.segments).intersection(sent.kept)
        except PayloadError:
            run.cancel()
            run.wait_ended(STOPPED_S)
            raise

    def _list_queued(self, waiting: Sequence[Submission]) -> None:
        """Show what is queued to the user's shells."""
        runs = [
            QueuedRun(
                run=each.run.id,
                label=each.run.record.label,
                holder=self.identity.label,
                pool=each.pool,
                place=each.run.place,
                ranks=each.size.count or 0,
                queued_at_s=each.run.clock.began_at_s,
            )
            for each in waiting
        ]
        queue_list.write(paths.runtime_directory(), self.identity.name, runs)

    def _remember(self, run: Run) -> None:
        self.runs.add(run)
        if (on_change := self.on_change) is not None:
            on_change()

    def _after(self, group: WorkerGroup, run: Run) -> None:
        """After the end of a run, mark the handles on ranks that died in it as lost. In the node's thread."""
        gone = [rank.rank for rank in run.record.ranks.values() if rank.gone]
        for handle in list(group.handles):
            handle.mark_lost(gone)

    def pass_on(self) -> None:
        """Tell the ranks to free the values to which this notebook no longer has a handle."""
        self._kept_values.pass_on()

    def handles(self, run: Run, names: Iterable[str]) -> dict[str, RankValue]:
        """Return handles to the values that a run has kept, for the names that at least one rank defined."""
        group = next((group for group in self.pools.groups() if group.run is run), None)
        return {} if group is None else self._kept_values.handles(group, run, names)

    def wait(self, run: Run, view: View, options: Options) -> Any:
        """Wait for a run, as `Run.wait` does; with `--debug` in its complete options, examine its failure before its
        exception is raised."""
        try:
            return run.wait(view)
        except Exception:
            if options.debug:
                from jupyter_distrib.kernel.session import failure_examination

                failure_examination.offer(self.runs, self.pools)
            raise

    def find_run(self, name: str | None) -> Run:
        """Return the run with this id or number, or the last one for None. A number is that of the run in this
        notebook, or else that in `%distributed_runs`. Raises `PoolError`."""
        if name is None or not name.isdecimal():
            return self.runs.find(name)
        from jupyter_distrib.kernel.session import saved_runs

        self.history_writer.flush()
        run, listed = self.runs.last(name), saved_runs.id_of(name)
        if run is None and listed:
            if (run := self.runs.last(listed)) is None:
                raise PoolError(saved_runs.not_here(name, listed))
        elif run is not None and listed not in ("", run.id):
            print(f"This is run {run.id}; number {name} of %distributed_runs is {listed}.", file=sys.stderr)
        return self.runs.find(name) if run is None else run

    def attach(self, name: str | None) -> Run:
        """Return a detached run of this kernel or an earlier one, with its whole record. Raises `PoolError`."""
        if (own := self.runs.last(name, detached=True)) is not None:
            return own
        from jupyter_distrib.kernel.session import detached

        listed = detached.choose(name, self.identity)
        if listed is None:
            from jupyter_distrib.kernel.session import saved_runs

            if sentence := saved_runs.about_lost(name, self.identity):
                saved_runs.save_lost(self.choices.readable_settings()[0])
                raise PoolError(sentence)
        connection = self.pools.connect(self.choices.pool) if listed is None else self.pools.connections.reach(listed)
        remark = f"runs on {where}" if listed is not None and (where := detached.elsewhere(listed)) else ""

        def make(event: m.Attached) -> Run:
            run = new_runs.attached(event, connection, remark)
            self.observers.follow(run, track=event.trackers)
            return run

        answer = connection.attach(name or "" if listed is None else listed.run, make)
        if isinstance(answer, m.NotAttached):
            raise PoolError(answer.reason)
        self._remember(answer)
        return answer


_current: Session | None = None
_making = threading.Lock()
os.register_at_fork(before=_making.acquire, after_in_parent=_making.release, after_in_child=_making.release)


def current() -> Session:
    """Return the session of this process; a forked child of the kernel gets its own."""
    global _current
    with _making:
        if _current is None or _current.identity.pid != os.getpid():
            _current = Session()
        return _current


def runs(*, active: bool | None = None) -> list[Run]:
    """Return the last runs of this notebook and all that are queued or go on, oldest first.

    Args:
        active: True for runs that have not ended, False for ended runs, None for all.
    """
    known = current().history
    return [run for run in known if active is None or run.done() is not active]


def close() -> None:
    """End the session, if there is one; the next use starts a new one."""
    global _current
    if _current is not None and _current.identity.pid == os.getpid():
        _current.queue.close()
        _current.history_writer.close()
        _current.notifier.flush()
        _current.pools.close()
        _current.sent_values.clear()
    _current = None
