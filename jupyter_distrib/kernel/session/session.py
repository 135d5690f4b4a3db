"""The session of one kernel: the runs on its ranks. One instance per process (`current`); it has a pool manager, which
holds the ranks (`kernel/session/pool_manager.py`), and the choices that were made in this notebook.

Called from the thread that runs the cell; events of a pool arrive in that pool's own thread
(`kernel/session/connection.py`)."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from jupyter_distrib import trackers
from jupyter_distrib.errors import PayloadError, PoolError
from jupyter_distrib.kernel.capture.capture import Dropped
from jupyter_distrib.kernel.record.observer import ObservedRun
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.kernel.session import detached, selection, travelling_environment
from jupyter_distrib.kernel.session.choices import Choices
from jupyter_distrib.kernel.session.connection import Connection
from jupyter_distrib.kernel.session.handles import KeptValues
from jupyter_distrib.kernel.session.kernel_identity import KernelIdentity
from jupyter_distrib.kernel.session.observers import Observers
from jupyter_distrib.kernel.session.pool_manager import PoolManager
from jupyter_distrib.kernel.session.results import RankValue, Results
from jupyter_distrib.kernel.session.run import Run
from jupyter_distrib.kernel.session.worker_group import WorkerGroup
from jupyter_distrib.kernel.settings.cell_options import OPTIONS, Options
from jupyter_distrib.kernel.settings.settings import Settings
from jupyter_distrib.serialization import payload, shared_memory
from jupyter_distrib.system import interrupts, library_settings, process, process_environment
from jupyter_distrib.system.formatting import rank_list
from jupyter_distrib.wire.descriptors import NO_DESCRIPTORS, Descriptors
from jupyter_distrib.wire.messages import (
    AskStacks,
    Attached,
    Cell,
    Ended,
    Execute,
    NotAttached,
    Noted,
    Parcel,
    Setting,
    Stop,
)

HISTORY = 20
"""The number of runs that are remembered; more only while more go on."""
STOPPED_S = 5.0
"""The most seconds to wait for the end of a run whose cell could not be sent completely."""
CHECKED = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
"""The variable with which torch compares the ranks' calls before each collective."""
GATHER = "from jupyter_distrib.worker.autoparallel import gather_shards\ngather_shards.of(__kept__)"
"""The source of the cell that fetches a sharded value."""


class Session:
    """The session of this kernel: its ranks, and the runs on them."""

    def __init__(self) -> None:
        self.identity = KernelIdentity()
        self.choices = Choices()
        self.pools = PoolManager(self.identity, self.choices, self.changed)
        self.on_change: Callable[[], object] = lambda: None
        """The function that is called when worker groups or runs have come, changed or gone; from any thread."""
        self.history: tuple[Run, ...] = ()
        """The last runs, oldest first, and all that go on."""
        self.dropped: dict[str, Dropped] = {}
        """The names that a distributed cell defined on the ranks only."""
        self._lock = threading.Lock()
        """The lock of `history`."""
        self.observers = Observers()
        self._numbers = itertools.count(1)
        self._kept_values = KeptValues(self._fetch)

    @property
    def settings(self) -> Settings:
        """The pools and defaults as they are now. Raises `OptionsError` for a file with an error."""
        return self.choices.settings

    def changed(self) -> None:
        self.on_change()

    def start(
        self,
        cell: Cell,
        packed: payload.Packed,
        options: Options,
        *,
        label: str,
        cell_id: str = "",
        handles: Sequence[RankValue] = (),
        on_ended: Callable[[Run], object] | None = None,
        settings: Settings | None = None,
        observed: bool = True,
        awaited: bool = True,
    ) -> Run:
        """Send the cell to its ranks. Returns as soon as the order to run it is sent.

        `on_ended` is called in the node's thread, before a thread that waits for the run learns of its end. `settings`
        are the settings with which the options were read, by default the present ones. With `observed`, observers may
        follow the run. With `awaited`, the caller waits for its end.

        Raises:
            PoolError, CaptureError, ValueLost: Nothing was started.
        """
        settings = settings or self.settings
        for text in self.choices.untold(settings):
            print(text)
        options, asked = _with_strategys_variables(settings.filled(options)), options
        trackers.check_installed(options.track)
        self.pass_on()
        with self.pools.taking(options, handles) as group:
            for text in _meaningless(options, group.connection):
                print(text)
            parcel, views = payload.laid_out(packed)
            content = shared_memory.Content(views) if views else None
            with content or nullcontext():
                if content is not None and not group.connection.capabilities.streams_content:
                    content.fill()
                self.pools.wait_open(group)
                origins = settings.origins(asked)
                run = self._run(group, options, cell, label=label, cell_id=cell_id, origins=origins, awaited=awaited)
                run.values.held = packed.sent
                if on_ended is not None:
                    run.on_ended.append(lambda: on_ended(run))
                with _observers_hear_of_the_end(run):
                    given = self.observers.follow(_facts(run, cell, options), run) if observed else {}
                    command = self._command(run, group, _with_variables(options, given), cell, parcel)
                    self._send(run, group, command, content)
        return run

    def _send(self, run: Run, group: WorkerGroup, command: Execute, content: shared_memory.Content | None) -> None:
        """Send the command with its content. Once ranks may have received any of it, an interrupt cancels the run."""
        connection = group.connection
        capabilities = connection.capabilities
        early = content is not None and capabilities.streams_content
        guard = interrupts.Uninterrupted(run.cancel)
        try:
            with nullcontext() if capabilities.runs_in_send else guard:
                fds = [] if content is None else content.early() if early else [content.finish()]
                group.run = run
                self._remember(run)
                connection.begin(run)
                connection.node.send(command, Descriptors(fds) if fds else NO_DESCRIPTORS)
                if content is not None and early:
                    content.fill(given_up=lambda: guard.pressed or run.interrupted)
        except PayloadError:
            run.cancel()
            run.wait_ended(STOPPED_S)
            raise

    def _command(self, run: Run, group: WorkerGroup, options: Options, cell: Cell, inputs: Parcel) -> Execute:
        return Execute(
            run=run.id,
            group=group.name,
            ranks=tuple(run.record.ranks),
            cell=cell,
            inputs=inputs,
            setting=self._setting(options, group.connection),
            detached=options.detach,
            timeout_s=options.timeout_s,
            hang_timeout_s=options.hang_timeout_s,
            max_restarts=options.max_restarts or 0,
            restart_on_error=options.restart_on == "error",
            label=run.record.label,
        )

    def _run(
        self,
        group: WorkerGroup,
        options: Options,
        cell: Cell,
        *,
        label: str,
        cell_id: str,
        origins: str,
        awaited: bool,
    ) -> Run:
        ranks = tuple(sorted(options.on)) if options.on is not None else tuple(range(group.size))
        if missing := set(ranks) - set(range(group.size)):
            raise PoolError(f"--on names {rank_list(missing)}, but there are {rank_list(range(group.size))} only.")
        record = RunRecord(
            run=f"{self.identity.name}-{next(self._numbers)}",
            label=label,
            ranks=ranks,
            world_size=group.size,
            gpus=group.gpus,
            strategy=options.strategy or "none",
            workers=group.workers,
            remark="; ".join(filter(None, (origins, group.connection.versions.remark))),
        )
        if options.gpus is not None and not group.gpus:
            record.apply(Noted(run=record.run, rank=None, text=f"no GPU here: {group.size} CPU ranks (gloo)"))
        if device := library_settings.default_device():
            text = f"torch's default device of the notebook, {device}, is not set on the ranks: use `device`"
            record.apply(Noted(run=record.run, rank=None, text=text))
        for text in group.notes:
            record.apply(Noted(run=record.run, rank=None, text=text))
        group.notes = ()
        node = group.connection.node
        lines = {cell.filename: cell.source.splitlines(keepends=True)}
        run = Run(
            record,
            lambda force: node.send(Stop(run=record.run, force=force)),
            pool=group.connection.pool,
            ask_stacks=lambda: node.send(AskStacks(run=record.run)),
            abandon=group.connection.abandon,
            cell=lines,
            detached=options.detach,
            awaited=awaited,
            cell_id=cell_id,
            echoes_output=group.connection.capabilities.echoes_output,
        )
        run.on_ended.append(lambda: self._after(group, run))
        return run

    def _remember(self, run: Run) -> None:
        with self._lock:
            over = [each for each in self.history if each.done()]
            gone = over[: max(0, len(self.history) + 1 - HISTORY)]
            self.history = (*(each for each in self.history if each not in gone), run)
        self.changed()

    def _after(self, group: WorkerGroup, run: Run) -> None:
        """Mark the handles on ranks that died in a run as lost, after its end. In the node's thread."""
        gone = [rank.rank for rank in run.record.ranks.values() if rank.gone]
        for handle in list(group.handles):
            handle.mark_lost(gone)

    def _setting(self, options: Options, connection: Connection) -> Setting:
        directory = os.getcwd()
        path = tuple(folder or directory for folder in sys.path)
        return Setting(
            env={
                **(travelling_environment.that_travel() if connection.remote else process_environment.variables()),
                **(CHECKED if options.check else {}),
                **options.env,
            },
            own_environment=connection.remote,
            directory=directory,
            umask=process.umask(),
            path=travelling_environment.without_own(path) if connection.elsewhere else path,
            own_libraries=connection.elsewhere,
            libraries=library_settings.read(),
            strategy=options.strategy or "none",
            strategy_options=options.strategy_options,
            keep=options.keep,
            by_value=options.detach,
        )

    def pass_on(self) -> None:
        """Tell the ranks to free the values to which this notebook has no handle any more."""
        self._kept_values.pass_on()

    def handles(self, run: Run, names: Iterable[str]) -> dict[str, RankValue]:
        """Return handles to the values that a run has kept, for the names that at least one rank defined."""
        group = next((group for group in self.pools.groups() if group.run is run), None)
        return {} if group is None else self._kept_values.handles(group, run, names)

    def _fetch(self, group: WorkerGroup, key: str, rank: int) -> Any:
        """Fetch a copy of one rank's kept value by a run on that rank, or on all ranks if each has a shard."""
        handle = next(handle for handle in group.handles if handle.key == key)
        if group.busy:
            raise selection.busy(group)
        connection = group.connection
        on, source, home = ((rank,), "__kept__", rank) if not handle.sharded else (None, GATHER, 0)
        options = Options(on=on, pool=connection.pool, strategy="none", pool_options=dict(connection.options))
        label = f"{handle.name}[{rank}]"
        results = self._ask(source, options, label, {"__kept__": handle}, [handle])
        return None if results is None else results[home]

    def ask_ranks(self, group: WorkerGroup, source: str, label: str) -> Results | None:
        """Return the values of a source that all ranks of an idle group execute, in a run that leaves no trace."""
        own = group.connection
        options = Options(pool=own.pool, strategy="none", pool_options=dict(own.options)).resized(group.asked.size)
        return self._ask(source, options, label, {}, ())

    def _ask(
        self, source: str, options: Options, label: str, values: Mapping[str, Any], handles: Sequence[RankValue]
    ) -> Results | None:
        cell, packed = Cell(source=source, filename=label), payload.pack_inputs(values, {})
        run = self.start(cell, packed, options, label=label, handles=handles, observed=False)
        with self._lock:
            self.history = tuple(each for each in self.history if each is not run)
        found: Results | None = run.wait()
        return found

    def find_run(self, name: str | None) -> Run:
        """Return the run with this id or number, or the last one for None. Raises `PoolError`."""
        for run in reversed(self.history):
            if name is None or name in (run.id, run.id.rpartition("-")[2]):
                return run
        ids = ", ".join(run.id for run in self.history)
        raise PoolError(
            f"there is no run {name} in this notebook; there are: {ids}." if ids else "nothing has run yet."
        )

    def attach(self, name: str | None) -> Run:
        """Return a detached run of this kernel or an earlier one, with its whole record. Raises `PoolError`."""
        for run in reversed(self.history):
            if run.detached and (name is None or name in (run.id, run.id.rpartition("-")[2])):
                return run
        listed = detached.choose(name, self.identity)
        connection = self.pools.connect(self.choices.pool) if listed is None else self.pools.connections.reach(listed)

        def make(event: Attached) -> Run:
            record = RunRecord(
                run=event.run,
                label=event.label,
                ranks=event.ranks,
                world_size=event.world_size,
                gpus=event.gpus,
                strategy=event.strategy,
                workers=event.workers,
            )
            stop = lambda force: connection.node.send(Stop(run=event.run, force=force))  # noqa: E731
            ask = lambda: connection.node.send(AskStacks(run=event.run))  # noqa: E731
            run = Run(
                record,
                stop,
                pool=connection.pool,
                ask_stacks=ask,
                abandon=connection.abandon,
                age_s=event.elapsed_s,
                detached=True,
            )
            self.observers.follow(_facts(run), run)
            return run

        answer = connection.attach(name or "" if listed is None else listed.run, make)
        if isinstance(answer, NotAttached):
            raise PoolError(answer.reason)
        self._remember(answer)
        return answer


def _facts(run: Run, cell: Cell | None = None, options: Options | None = None) -> ObservedRun:
    """Return the facts about a run for its observers; a run without its cell is an attached one."""
    record = run.record
    return ObservedRun(
        id=run.id,
        label=record.label,
        source=cell.source if cell is not None else "",
        options={} if options is None else options.given(),
        strategy=record.strategy,
        pool=run.pool,
        ranks=tuple(record.ranks),
        world_size=record.world_size,
        gpus=record.gpus,
        detached=run.detached,
        attached=cell is None,
        began_at_s=run.clock.began_at_s,
        note=run.note,
    )


@contextmanager
def _observers_hear_of_the_end(run: Run) -> Iterator[None]:
    """Pass the end of the run to its observers if any exception keeps the cell from being sent."""
    try:
        yield
    except BaseException:
        if not run.done():
            run.observers.tell(Ended(run=run.id, at_s=time.monotonic()), run.record)
        raise


def _with_strategys_variables(options: Options) -> Options:
    from jupyter_distrib.kernel.settings.available import strategy_environment

    return _with_variables(options, strategy_environment(options.strategy or "none", options.strategy_options))


def _with_variables(options: Options, given: Mapping[str, str]) -> Options:
    """Return the options with these environment variables, which `--env` may override."""
    return replace(options, env={**given, **options.env}) if given else options


def _meaningless(options: Options, connection: Connection) -> Iterator[str]:
    """Yield a sentence for each option of the cell that has no effect on its pool."""
    ignored = connection.capabilities.ignored_options
    for option in OPTIONS if ignored else ():
        if option.name in ignored and getattr(options, option.name):
            yield f"{option.flag} has no meaning on the {connection.kind} pool: {ignored[option.name]}"


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


def close() -> None:
    """End the session, if there is one; the next use starts a new one."""
    global _current
    if _current is not None and _current.identity.pid == os.getpid():
        _current.pools.close()
    _current = None
