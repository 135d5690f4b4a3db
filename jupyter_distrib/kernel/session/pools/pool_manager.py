"""The pools that this kernel has reached, and its worker groups in them: a cell takes one that fits or opens one; users
start, stop and resize them. Knows no cells.

Called from the thread that runs the cell, or that starts a queued run; events of a pool arrive in that pool's own
thread, which also drops a pool that is lost (`kernel/session/pools/connection.py`).
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import field, replace
from typing import TypeVar

from jupyter_distrib.errors import DistributedError, PoolError
from jupyter_distrib.kernel.session.pools import selection
from jupyter_distrib.kernel.session.pools.connection import (
    Connection,
    ConnectionState,
    GroupRequest,
    GroupState,
    PoolAddress,
    WorkerGroup,
)
from jupyter_distrib.kernel.session.pools.kernel_identity import KernelIdentity
from jupyter_distrib.kernel.session.pools.waiting_line import WaitingLine
from jupyter_distrib.kernel.session.runs.results import RankValue
from jupyter_distrib.kernel.session.runs.run_queue import Capacity
from jupyter_distrib.kernel.settings.cell_options import DEFAULT_POOL, GroupSize, Options
from jupyter_distrib.kernel.settings.choices import Choices
from jupyter_distrib.kernel.settings.settings import NOTEBOOK, CellOptions, NamedPool
from jupyter_distrib.pools.local import RunningServer
from jupyter_distrib.pools.machines.machine import end_left
from jupyter_distrib.pools.server_home import AGENT_NAME
from jupyter_distrib.system import interrupts, open_files
from jupyter_distrib.system.data_class import data_class
from jupyter_distrib.system.formatting import duration
from jupyter_distrib.system.process import TOO_MANY_PROCESSES
from jupyter_distrib.system.run_list import ListedRun
from jupyter_distrib.wire import messages as m

PATIENCE_S = 30 * 86_400.0
"""Seconds that a submitted run, or a cell that begins with what there is, waits for ranks that its pool has but others
use."""
_HEAD_START_S = 0.1
"""Maximum seconds for which the thread that reaches the pool has the kernel to itself."""
T = TypeVar("T")


class Connections:
    """The connections of one kernel, one for each pool and set of options.

    Args:
        identity: The identity of the kernel.
        choices: The pools that exist.
        on_change: Called when a connection, or a worker group on one, has come, changed or gone; from any thread.
    """

    def __init__(self, identity: KernelIdentity, choices: Choices, on_change: Callable[[], object]) -> None:
        self._identity, self._choices, self._on_change = identity, choices, on_change
        self._open: list[Connection] = []
        self._of_others: dict[str, Connection] = {}
        """Connections to processes that serve other notebooks or hold detached runs, by the name of their socket."""
        self._lock = threading.RLock()

    def __iter__(self) -> Iterator[Connection]:
        """Iterate over the pools in use, in the order of first use."""
        return iter(list(self._open))

    def connect(self, pool: str, options: Mapping[str, str] | None = None, group: str = "") -> Connection:
        """Reach a pool, once for each set of options. Raises `PoolError`.

        Args:
            pool: Its name.
            options: The options of its kind; None: those of its definition.
            group: The name of the worker group that is wanted, for which a pool that has moved since counts as well.
        """
        for connection in list(self._open):
            if connection.node.has_ended():
                connection.wait_lost()  # it is dropped then, and the cell gets another agent
        with self._lock:
            for connection in self._open:
                is_meant = connection.facts.pool == pool and connection.facts.options == options
                if is_meant and (group in connection.groups or connection.is_current()):
                    return connection
            named = self._choices.settings.pools[pool]
            if options is None:
                return self.connect(pool, named.options, group)
            self._choices.check_trusted(named)
            address = PoolAddress(name=pool, kind=named.kind, options=dict(options))
            try:
                connection = Connection(address, self._identity.hello(), on_lost=self._drop, on_change=self._on_change)
            except OSError as error:
                open_files.raise_if_full(error)
                raise
            except RuntimeError as error:
                if "start new thread" not in str(error):
                    raise
                raise PoolError(f"pool {pool} cannot be reached: {TOO_MANY_PROCESSES}.") from error
            self._open.append(connection)
            return connection

    def warm_up(self) -> None:
        """Reach the pool of the first cell while the user is still typing: the local agent imports torch, a coordinator
        joins its cluster. Machines on demand that were left without a keeper are ended. Called when the extension is
        loaded."""

        def connect() -> None:
            try:
                end_left()
                self.connect(self._choices.pool)
            except (DistributedError, OSError):
                return  # the first cell meets the same error and reports it

        thread = threading.Thread(target=connect, name="jupyter_distrib-warm-up", daemon=True)
        thread.start()
        thread.join(_HEAD_START_S)  # it would take three times as long while the imports that follow run

    def reach(self, run: ListedRun) -> Connection:
        """Return a connection to the process that holds this detached run. Raises `PoolError`."""
        with self._lock:
            for connection in (*self._open, *self._of_others.values()):
                if connection.process == (run.pid_namespace, run.pid):
                    return connection
            return self.reach_server(run.server)

    def reach_server(self, server: str) -> Connection:
        """Return a connection to the running agent or coordinator whose socket has this name. Raises `PoolError`."""
        with self._lock:
            if (known := self._of_others.get(server)) is not None:
                return known
            kind = server.partition("-")[0]
            name = DEFAULT_POOL if kind == AGENT_NAME else kind
            connection = Connection(
                PoolAddress(name=name, kind=name, options={}),
                self._identity.hello(),
                opened=RunningServer(server),
                on_lost=self._drop,
                on_change=self._on_change,
            )
            self._of_others[server] = connection
            return connection

    def remove_all(self) -> list[Connection]:
        """Return all connections and forget them."""
        with self._lock:
            connections = [*self._open, *self._of_others.values()]
            self._open, self._of_others = [], {}
            return connections

    def _drop(self, connection: Connection) -> None:
        with self._lock:
            if connection in self._open:
                self._open.remove(connection)
            self._of_others = {name: each for name, each in self._of_others.items() if each is not connection}
        self._on_change()


@data_class
class ConcurrentStart:
    """The terms on which a cell that the notebook does not wait for gets its ranks."""

    wait_s: float
    """Maximum seconds to wait for busy ranks or GPUs."""
    say: Callable[[str], object]
    """Called with a sentence on what the cell waits for."""


@data_class
class RankStart:
    """A start of ranks in progress, from the search for their pool on."""

    pool: str
    label: str = ""
    """The cell that waits for the ranks; empty if none does."""
    cell: str = ""
    """The id of that cell in its notebook; empty if it is not known."""
    run: str = ""
    """The id of the submitted run that waits for them; empty if none does."""
    began_at_s: float = field(default_factory=time.time)
    """Time since the epoch."""


class StartCut(PoolError):
    """An error for ranks that were starting when the process that looks after them ended."""


def once_more(start: Callable[[], T]) -> T:
    """Return the result of a start of ranks that is repeated because the process that looks after them has ended
    meanwhile."""
    try:
        return start()
    except StartCut as error:
        raise PoolError(f"the ranks could not be started: {error}, 2 times: try again.") from None


class PoolManager:
    """The worker groups of a kernel in its pools.

    Args:
        identity: The identity of the kernel.
        choices: The pools that exist, and the sizes that were chosen.
        on_change: Called when a pool or a worker group has come, changed or gone; from any thread.
    """

    def __init__(self, identity: KernelIdentity, choices: Choices, on_change: Callable[[], object]) -> None:
        self.connections = Connections(identity, choices, on_change)
        self._identity, self._choices, self._on_change = identity, choices, on_change
        self.starts: list[RankStart] = []
        """The starts in progress; also of cells that are about to get warm ranks."""
        self._turns = threading.Condition(threading.RLock())
        """The condition on which threads wait for ranks that another thread has claimed."""
        self._numbers = itertools.count(1)

    def connect(self, pool: str, options: Mapping[str, str] | None = None) -> Connection:
        """Reach a pool, once for each set of options. Raises `PoolError`."""
        return self.connections.connect(pool, options)

    def capacity(self, pool: str, options: Mapping[str, str]) -> Capacity:
        """Return the number of ranks that a pool has room for at once: its size in the settings, else what its nodes
        have, which are reached with these options. Raises `PoolError`."""
        size = self._choices.settings.size_of(pool)
        if size.count and not size.gpus:
            return Capacity(gpus=0, cpus=size.count)
        nodes = self.connect(pool, options).ask().nodes or ()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is not None and len(nodes) < 2:
            gpus = len(list(filter(None, visible.split(","))))
        else:
            gpus = sum(node.gpus or 0 for node in nodes)
        cpus = int(sum(node.cpus or 0 for node in nodes)) or os.cpu_count() or 1
        return Capacity(gpus=size.count or gpus, cpus=size.count or cpus)

    def groups(self, pool: str | None = None) -> list[WorkerGroup]:
        """Return the worker groups of this pool, or of all pools."""
        reached = self.connections if pool is None else [each for each in self.connections if pool == each.facts.pool]
        return [group for connection in reached for group in list(connection.groups.values())]

    # ------------------------------------------------------------------------------------------------ for a cell

    @contextmanager
    def starting(self, start: RankStart) -> Iterator[None]:
        """List a start of ranks within the block."""
        self.starts = [*self.starts, start]
        self._on_change()
        try:
            yield
        finally:
            self.starts = [each for each in self.starts if each is not start]
            self._on_change()

    @contextmanager
    def claiming(
        self,
        options: CellOptions,
        start: RankStart,
        handles: Sequence[RankValue] = (),
        *,
        concurrent: ConcurrentStart | None = None,
        unused: bool = False,
    ) -> Iterator[WorkerGroup]:
        """Claim the ranks that a cell asks for: warm ones if they fit, else new ones that are still starting. No other
        thread gets them until the cell has been sent or has failed to start.

        Args:
            options: The cell's options.
            start: Its start, which is listed meanwhile unless the pool has ranks that are up.
            handles: The kept values that the cell reads.
            concurrent: For a cell that the notebook does not wait for: it gets other ranks than busy ones.
            unused: Whether to claim ranks that have run nothing yet, if possible.

        Raises:
            PoolError: The ranks still execute another cell of this notebook after the time that `options` allow.
        """
        waiting_s = concurrent.wait_s if concurrent else options.filled.wait_s or 0.0
        say = concurrent.say if concurrent else print
        until_s = time.monotonic() + waiting_s
        with ExitStack() as listed:
            if not any(group.state is GroupState.OPEN for group in self.groups(start.pool)):
                listed.enter_context(self.starting(start))
            while (
                group := self._claim(options, handles, concurrent, unused=unused)
            ).claimed_by is not threading.current_thread():
                if waiting_s and until_s > time.monotonic():
                    label = group.executing.record.label if group.executing else "another cell"
                    say(f"Waiting up to {duration(waiting_s)} for {label}, which runs on these ranks.")
                    waiting_s = 0.0
                selection.wait_or_refuse(group, until_s, self._turns)
            try:
                if group.state is GroupState.OPENING and start not in self.starts:
                    listed.enter_context(self.starting(start))
                yield group
            finally:
                with self._turns:
                    group.claimed_by = None
                    self._turns.notify_all()

    def _claim(
        self, options: CellOptions, handles: Sequence[RankValue], concurrent: ConcurrentStart | None, *, unused: bool
    ) -> WorkerGroup:
        """Choose ranks, and claim them for this thread's cell unless they are busy."""
        with self._turns:
            group = self._choose(options, handles, concurrent, unused=unused)
            if not group.busy:
                group.claimed_by, group.claimed_concurrently = threading.current_thread(), concurrent is not None
            return group

    def _choose(
        self,
        options: CellOptions,
        handles: Sequence[RankValue] = (),
        concurrent: ConcurrentStart | None = None,
        *,
        unused: bool = False,
    ) -> WorkerGroup:
        filled, size = options.filled, options.size
        keeps = handles[0].group if handles else ""
        visible = _visible()
        connection = self.connections.connect(filled.pool or self._choices.pool, filled.pool_options, keeps)
        if connection.gpus.devices != visible:
            connection.gpus.update(visible)
        packages = connection.packages() if connection.facts.packages_mode != "off" else None
        request = selection.requested(options, connection, packages)
        if handles:
            group = selection.of_handles(handles, connection, size, filled.on)
            return selection.with_notes_on_changes(group, request)
        if filled.on is not None and size.count is None:
            return selection.newest(connection)
        fitting, in_use = selection.fitting(connection.groups.values(), request)
        if not (fitting or in_use or filled.fresh):
            fitting = [
                selection.with_notes_on_changes(group, request)
                for group in connection.groups.values()
                if group.kept and not group.busy and selection.fits_if_kept(group, request)
            ]
        busy = []
        for group in in_use:
            if group.executing is not None and group.executing.abandoned:
                self.close_group(group)
            elif concurrent is None and not group.busy_concurrently:
                busy.append(group)
        if filled.fresh and not busy:
            while fitting:
                self.close_group(fitting.pop())
        elif unused and not busy:
            fitting = self._unused(fitting)
        if free := fitting or busy:
            return free[-1]
        if not connection.is_current(surely=True):
            return self._choose(options, handles, concurrent, unused=unused)  # on another process, which is here
        wait_s = concurrent.wait_s if concurrent else filled.wait_s or (PATIENCE_S if size.least else 0.0)
        return self._open(connection, request, wait_s)

    def _unused(self, groups: list[WorkerGroup]) -> list[WorkerGroup]:
        """Return the groups that have run nothing. Of the others, those without kept values are ended. Those with kept
        values stay: on CPUs beside new ranks; on GPUs, of which there may be no more, they are returned too."""
        chosen = []
        for group in groups:
            if group.run is None:
                chosen.append(group)
            elif not group.kept:
                self.close_group(group)
            elif group.gpus:
                group.notes = (*group.notes, _ON_KEEPING_RANKS)
                chosen.append(group)
        return chosen

    def _open(self, connection: Connection, request: GroupRequest, wait_s: float) -> WorkerGroup:
        """Request new ranks, and close idle worker groups that keep no values."""
        pool = connection.facts.pool
        moved = [each for each in self.connections if each.facts.pool == pool and not each.is_current()]
        for other in [group for each in (connection, *moved) for group in list(each.groups.values())]:
            if not other.busy and not other.kept:
                self.close_group(other)
        name = f"{self._identity.name}-c{next(self._numbers)}"
        group = WorkerGroup(name=name, connection=connection, asked=request)
        command = m.OpenWorkerGroup(
            group=name,
            size=request.size.count or 0,
            least=request.size.least,
            unit=request.size.step,
            gpus=request.size.gpus,
            load_env=request.load_env,
            visible=request.visible,
            gpu_type=request.size.gpu_type,
            wait_s=wait_s,
            packages=request.packages,
        )
        try:
            with interrupts.Uninterrupted():
                connection.groups[name] = group
                connection.node.send(command)
        except KeyboardInterrupt:
            self.close_group(group)
            raise
        return group

    def wait_open(self, group: WorkerGroup, say: Callable[[str], object] = print) -> None:
        """Wait until the group's ranks are up. Raises `PoolError` if they cannot be; an interrupt closes the group."""
        if not group.opened.is_set():
            self._say_until_open(group, say)
        if refusal := group.connection.versions.refusal:
            self.close_group(group)
            raise PoolError(refusal)
        if group.state is GroupState.CLOSED:
            error = StartCut if group.connection.state is ConnectionState.LOST else PoolError
            raise error(group.reason or "the ranks were taken away while they were starting.")

    def _say_until_open(self, group: WorkerGroup, say: Callable[[str], object]) -> None:
        line = WaitingLine()
        say = line.say if say is print else say
        try:
            while not group.opened.is_set():
                if reason := interrupts.get(group.news):
                    say(f"Waiting: {reason}")
                else:
                    group.news.put("")  # to wake another thread that waits for the same ranks
        except KeyboardInterrupt:
            self.close_group(group)
            raise
        finally:
            line.end()

    # ------------------------------------------------------------------------------------------------ for users

    def add_pool(self, pool: NamedPool) -> None:
        """Add a pool to this notebook; a different pool that was added under that name is removed, with its ranks."""
        if self._choices.added.get(pool.name, pool) != pool:
            self.remove_pool(pool.name)
        self._choices.add(pool)
        self._on_change()

    def remove_pool(self, name: str) -> None:
        """End the ranks of a pool of this notebook and remove it. Raises `PoolError` for a pool that files define."""
        self._choices.check_removable(name)
        self.stop_ranks(name)
        self._choices.remove(name)
        self._on_change()

    def start_ranks(self, pool: str, size: GroupSize | None = None) -> None:
        """Start ranks before a cell asks for them, unless fitting ranks exist. A given size is remembered, unless its
        ranks do not start: each later cell would ask for them again."""
        if size is None:
            return self._start(Options(pool=pool))
        before = self._choices.sizes.get(pool)
        kept = self._choices.settings.size_of(pool).gpu_type if size.gpus else ""
        self._choices.resize(pool, replace(size, gpu_type=size.gpu_type or kept))
        try:
            return self._start(Options(pool=pool))
        except BaseException:
            self._choices.sizes.pop(pool, None)
            if before is not None:
                self._choices.sizes[pool] = before
            raise

    def _start(self, options: Options) -> None:
        def start() -> None:
            with self._turns:
                group = self._choose(self._choices.settings.completed(options))
            self.wait_open(group)

        with self.starting(RankStart(pool=options.pool or self._choices.pool)):
            try:
                start()
            except StartCut:
                once_more(start)

    def stop_ranks(self, pool: str, by: str = NOTEBOOK) -> None:
        """End the ranks of a pool and the runs on them; the values that they keep are lost."""
        for group in self.groups(pool):
            self.close_group(group, by)

    def restart_ranks(self, pool: str, by: str = NOTEBOOK) -> None:
        """Replace the ranks of a pool by the same number of new ones with the same kind of device."""
        up = [group for group in self.groups(pool) if group.size]
        self.stop_ranks(pool, by)
        options = Options(pool=pool)
        if up:
            last = up[-1]
            gpu_type = last.asked.size.gpu_type if last.gpus else ""
            size = GroupSize(count=last.size, gpus=last.gpus, gpu_type=gpu_type)
            options = options.resized(last.asked.size if last.asked.size.least else size)
        self._start(options)

    def resize(self, pool: str, size: GroupSize | int | None = None, by: str = NOTEBOOK) -> None:
        """Replace the ranks of a pool by ranks of this size, which is remembered.

        Args:
            pool: Its name.
            size: The new size; a mere number keeps the kind of device, and None stands for the chosen size.
            by: The place where the user asked for it.
        """
        if isinstance(size, int):
            gpus = next((group.gpus for group in self.groups(pool)), True)
            size = GroupSize(count=size, gpus=gpus)
        self.stop_ranks(pool, by)
        self.start_ranks(pool, size)

    def close_group(self, group: WorkerGroup, by: str = NOTEBOOK) -> None:
        """End the ranks of a group; a run on them ends, and its output says from where they were stopped."""
        with interrupts.Uninterrupted():
            group.connection.groups.pop(group.name, None)
            group.close(f"the ranks were stopped from {by} while they were starting.")
            group.connection.node.send(m.CloseWorkerGroup(group=group.name, reason=f"its ranks were stopped from {by}"))
        self._on_change()

    def close(self) -> None:
        """Close all connections: the agent ends this kernel's ranks, except those of detached runs, which are followed
        to their end."""
        for connection in self.connections.remove_all():
            for group in list(connection.groups.values()):
                if connection.runs and not (group.executing and group.executing.detached):
                    self.close_group(group)
                group.close("the extension was unloaded while the ranks were starting.")
            connection.leave()


_ON_KEEPING_RANKS = (
    "These ranks keep values of the notebook, so the script runs on them as they are; --fresh starts new ones and "
    "drops what they keep."
)


def _visible() -> tuple[str, ...] | None:
    """Return the GPUs that the notebook's CUDA_VISIBLE_DEVICES names; None for all."""
    words = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if words is None else tuple(filter(None, words.split(",")))
