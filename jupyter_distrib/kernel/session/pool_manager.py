"""The pools and ranks that a kernel holds, and the ones that the next cell uses. Knows no cells.

Called from the thread that runs the cell; events of a pool arrive in that pool's own thread
(`kernel/session/connection.py`)."""

from __future__ import annotations

import itertools
import os
import platform
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from jupyter_distrib.errors import DistributedError, PoolError
from jupyter_distrib.kernel.session import selection
from jupyter_distrib.kernel.session.connection import Connection, WorkerGroup
from jupyter_distrib.kernel.session.results import RankValue
from jupyter_distrib.kernel.settings import config_files
from jupyter_distrib.kernel.settings.cell_options import Options
from jupyter_distrib.kernel.settings.config_files import NOTEBOOK, NamedPool, Settings
from jupyter_distrib.pools.local import load_time_changes
from jupyter_distrib.system import interrupts, process_environment
from jupyter_distrib.system.formatting import duration
from jupyter_distrib.wire.messages import PROTOCOL, CloseWorkerGroup, Hello, OpenWorkerGroup

HEAD_START_S = 0.1
"""Seconds for which the thread that gets the pool ready has the kernel for itself, if it takes that long."""


class PoolManager:
    """The pools of one kernel, and its worker groups there."""

    def __init__(self) -> None:
        self.name = secrets.token_hex(3)
        self.pid = os.getpid()
        self.added: dict[str, NamedPool] = {}
        """Pools of this notebook alone."""
        self.used: str | None = None
        """The pool that was chosen in this notebook."""
        self.used_by = ""
        """Where: in a cell or in the sidebar."""
        self.picked_strategy: str | None = None
        self.picked: dict[str, dict[str, Any]] = {}
        """By pool, the `gpus`, `ranks` and `gpu_type` that were picked in the sidebar."""
        self.sizes: dict[str, tuple[int, bool]] = {}
        """By pool, how many ranks `%distributed_pool` asked for, and whether with GPUs."""
        self.on_change: Callable[[], object] = lambda: None
        """Whom to tell that worker groups or runs have come or gone; called from any thread."""
        self._loaded: tuple[config_files.FilesState, Settings] | None = None
        """The last content of files and environment."""
        self._connections: list[Connection] = []
        self._lock = threading.RLock()
        self._turns = threading.Condition(self._lock)
        """For threads that want ranks which another one has taken."""
        self._group_numbers = itertools.count(1)

    @property
    def settings(self) -> Settings:
        """Pools and defaults as they are now. Raises `OptionsError` for a file that is wrong."""
        state = config_files.state()
        if self._loaded is None or self._loaded[0] != state:
            from jupyter_distrib.kernel.settings.available import POOLS, STRATEGIES

            self._loaded = state, config_files.load(POOLS, STRATEGIES)
        found = self._loaded[1]
        if self.added:
            found = replace(found, pools=found.pools | self.added)
        if self.used in found.pools:
            found = replace(found, pool=self.used, pool_origin=self.used_by)
        if self.picked_strategy is not None and self.picked_strategy in found.strategies:
            found = replace(found, strategy=self.picked_strategy, strategy_origin=config_files.SIDEBAR)
        picked = {name: found.pools[name].resized(size) for name, size in self.picked.items() if name in found.pools}
        return replace(found, pools=found.pools | picked) if picked else found

    @property
    def pool(self) -> str:
        """The pool that cells use unless they say otherwise."""
        return self.settings.pool

    @property
    def strategy(self) -> str:
        return self.settings.strategy_for()

    @property
    def label(self) -> str:
        """The name of this kernel for others."""
        notebook = os.path.basename(_notebook())
        return f"{notebook} (kernel {self.pid})" if notebook else f"kernel {self.pid}"

    def hello(self) -> Hello:
        return Hello(
            protocol=PROTOCOL,
            session=self.name,
            pid=self.pid,
            label=self.label,
            notebook=_notebook(),
            python=platform.python_version(),
            torch=process_environment.version("torch"),
            cloudpickle=process_environment.version("cloudpickle"),
        )

    # ------------------------------------------------------------------------------------------------ pools and groups

    def connect(self, pool: str, options: Mapping[str, str] | None = None) -> Connection:
        """Reach a pool, once for each set of options."""
        with self._lock:
            for connection in self._connections:
                if connection.pool == pool and connection.options == options:
                    return connection
            named = self.settings.pools[pool]
            if options is None:
                return self.connect(pool, named.options)
            connection = Connection(pool, self.hello(), self._drop_connection, kind=named.kind, options=options)
            connection.on_change = self.changed
            self._connections.append(connection)
            return connection

    def connections(self) -> list[Connection]:
        """The pools that are in use, in the order of their first use."""
        return list(self._connections)

    def warm_up(self) -> None:
        """Reach the pool that cells will use while the user is still typing: the local agent imports torch, a
        coordinator joins its cluster. Called when the extension is loaded."""

        def connect() -> None:
            try:
                self.connect(self.pool)
            except (DistributedError, OSError):
                return  # the first cell meets the same trouble, and tells it

        thread = threading.Thread(target=connect, name="jupyter_distrib-warm-up", daemon=True)
        thread.start()
        thread.join(HEAD_START_S)  # beside the imports that follow it would take three times as long

    def _drop_connection(self, connection: Connection) -> None:
        with self._lock:
            if connection in self._connections:
                self._connections.remove(connection)
        self.changed()

    def changed(self) -> None:
        self.on_change()

    def groups(self) -> list[WorkerGroup]:
        return [group for connection in list(self._connections) for group in list(connection.groups.values())]

    @contextmanager
    def taking(self, options: Options, handles: Sequence[RankValue] = ()) -> Iterator[WorkerGroup]:
        """The ranks a cell asks for: warm ones if they fit, else new ones on their way. No other thread is given them
        until the cell has been sent, or has come to nothing.

        Raises:
            PoolError: They execute another cell of this notebook, also after the time that `options` allow.
        """
        waiting_s = options.wait_s or 0.0
        until_s = time.monotonic() + waiting_s
        while (group := self._take(options, handles)).taker is not threading.current_thread():
            if waiting_s and until_s > time.monotonic():
                label = group.executing.record.label if group.executing else "another cell"
                print(f"Waiting up to {duration(waiting_s)} for {label}, which runs on these ranks.")
                waiting_s = 0.0
            selection.wait_or_refuse(group, until_s, self._turns)
        try:
            yield group
        finally:
            with self._turns:
                group.taker = None
                self._turns.notify_all()

    def _take(self, options: Options, handles: Sequence[RankValue]) -> WorkerGroup:
        """Choose ranks, and take them for this thread's cell if they are free."""
        with self._turns:
            group = self._choose(options, handles)
            if not group.busy:
                group.taker = threading.current_thread()
            return group

    def _choose(self, options: Options, handles: Sequence[RankValue] = ()) -> WorkerGroup:
        connection = self.connect(options.pool or self.pool, options.pool_options)
        load_env = load_time_changes(options.env)
        connection.look_through(_visible())
        size, gpus = self._size(options, connection)
        if handles:
            return selection.of_handles(handles, connection, size, options.on)
        if options.on is not None and options.gpus is None and options.ranks is None:
            return selection.newest(connection)
        fitting = [
            group
            for group in connection.groups.values()
            if selection.fits(group, size, gpus, load_env, options.gpu_type)
        ]
        busy = []
        for group in [group for group in fitting if group.busy]:
            fitting.remove(group)
            if group.executing is not None and group.executing.abandoned:
                self.close_group(group)
            elif group.executing is None or not group.executing.detached:
                busy.append(group)
        if options.fresh and not busy:
            while fitting:
                self.close_group(fitting.pop())
        free = fitting or busy
        return free[-1] if free else self._open(connection, size, gpus, load_env, options)

    def _filled(self, options: Options, here: Settings) -> Options:
        """With every default in its place; what `%distributed_pool` has started counts for more than a file."""
        filled = here.filled(options)
        if filled.pool in self.sizes and not (options.gpus or options.ranks):
            return replace(filled, gpus=None, ranks=None)
        return filled

    def _size(self, options: Options, connection: Connection) -> tuple[int, bool]:
        """How many ranks, 0 for as many as there are GPUs; and whether GPUs are wanted."""
        if options.ranks is not None:
            return options.ranks, False
        if options.gpus is not None:
            # Nodes with GPUs may join a cluster.
            may_come = connection.remote and (bool(options.wait_s) or not connection.groups)
            return options.gpus, connection.has_gpus is not False or may_come
        return self.sizes.get(connection.pool, (0, connection.has_gpus is not False))

    def _open(
        self, connection: Connection, size: int, gpus: bool, load_env: dict[str, str], options: Options
    ) -> WorkerGroup:
        """Ask for new ranks; idle ones of another size that keep nothing make room."""
        for other in list(connection.groups.values()):
            if not other.busy and not other.kept:
                self.close_group(other)
        group = WorkerGroup(
            name=f"{self.name}-c{next(self._group_numbers)}",
            connection=connection,
            load_env=load_env,
            asked_size=selection.to_ask(size, gpus),
            asked_gpus=gpus,
            gpu_type=options.gpu_type or "",
            visible=connection.visible,
        )
        command = OpenWorkerGroup(
            group=group.name,
            size=group.asked_size,
            gpus=gpus,
            load_env=load_env,
            visible=group.visible,
            gpu_type=group.gpu_type,
            wait_s=options.wait_s or 0.0,
        )
        try:
            with interrupts.Uninterrupted():
                connection.groups[group.name] = group
                connection.node.send(command)
        except KeyboardInterrupt:
            self.close_group(group)
            raise
        return group

    def wait_open(self, group: WorkerGroup) -> None:
        """Until its ranks are up. Raises `PoolError` if they cannot be had; an interrupt gives them up."""
        try:
            while not group.opened.is_set():
                if reason := interrupts.take(group.news):
                    print(f"Waiting: {reason}")
                else:
                    group.news.put("")  # for another thread that waits for the same ranks
        except KeyboardInterrupt:
            self.close_group(group)
            raise
        if group.connection.refusal:
            self.close_group(group)
            raise PoolError(group.connection.refusal)
        if group.state == "closed":
            raise PoolError(group.reason or "the ranks were taken away while they were starting.")

    def add_pool(self, pool: NamedPool) -> None:
        """A pool of this notebook; one of that name that was added before goes, with its ranks, if it was another."""
        if self.added.get(pool.name, pool) != pool:
            self.remove_pool(pool.name)
        self.added[pool.name] = pool

    def remove_pool(self, name: str) -> None:
        """Raises `PoolError` if it is not this notebook's to remove."""
        if name not in self.added:
            raise PoolError(f"{name} comes from {self.settings.pools[name].origin}, not from this notebook.")
        self.stop_ranks(name)
        self.sizes.pop(name, None)
        del self.added[name]
        if self.used == name:
            self.used = None

    def start_ranks(self, pool: str, gpus: int | None, ranks: int | None) -> None:
        """Have ranks up before a cell asks for them; those that are at work are."""
        if gpus is not None or ranks is not None:
            self.sizes[pool] = (gpus or ranks or 0, ranks is None)
            self.picked.pop(pool, None)
        self._wait_for(Options(pool=pool))

    def _wait_for(self, options: Options) -> None:
        with self._lock:
            group = self._choose(self._filled(options, self.settings))
        self.wait_open(group)

    def stop_ranks(self, pool: str, by: str = NOTEBOOK) -> None:
        """End the ranks of a pool, and what runs there; what they keep is gone."""
        for group in self.groups():
            if group.connection.pool == pool:
                self.close_group(group, by)

    def restart_ranks(self, pool: str, by: str = NOTEBOOK) -> None:
        """New processes in place of those that are up: as many, and of the same kind."""
        up = [group for group in self.groups() if group.connection.pool == pool and group.size]
        self.stop_ranks(pool, by)
        same = Options(pool=pool)
        if up and up[-1].gpus:
            same = replace(same, gpus=up[-1].size, gpu_type=up[-1].gpu_type or None)
        elif up:
            same = replace(same, ranks=up[-1].size)
        self._wait_for(same)

    def resize(self, pool: str, size: int | None, gpus: int | None, ranks: int | None, by: str = NOTEBOOK) -> None:
        """From now on so many ranks; those that are up make room."""
        now = next((group.gpus for group in self.groups() if group.connection.pool == pool), ranks is None)
        self.stop_ranks(pool, by)
        self.start_ranks(pool, gpus or (size if now else None), ranks or (None if now else size))

    def close_group(self, group: WorkerGroup, by: str = NOTEBOOK) -> None:
        """End its ranks; a run on them ends, and says from where they were stopped."""
        with interrupts.Uninterrupted():
            group.connection.groups.pop(group.name, None)
            group.close("it was stopped")
            group.connection.node.send(CloseWorkerGroup(group=group.name, reason=f"its ranks were stopped from {by}"))
        self.changed()

    def use(self, pool: str | None) -> None:
        """Cells use this pool from now on."""
        self.used, self.used_by = pool, config_files.NOTEBOOK
        self.changed()

    def pick(self, *, pool: str | None = None, strategy: str | None = None, size: dict[str, Any] | None = None) -> None:
        """Choose what the next runs use where their cell does not say, as picked in the sidebar; None leaves a choice
        as it is.

        Args:
            pool: By name.
            strategy: By name.
            size: `gpus` with or without `gpu_type`, or `ranks`, of the pool that is then in use; empty for what the
                pool gives by itself.
        """
        if pool is not None and pool != self.pool:
            self.used, self.used_by = pool, config_files.SIDEBAR
        if strategy is not None and strategy != self.strategy:
            self.picked_strategy = strategy
        if size is not None:
            self.pick_size(self.pool, size)
        self.changed()

    def pick_size(self, pool: str, size: Mapping[str, Any]) -> None:
        """The `size` of `pick`, for any pool; nothing changes if that is what holds already."""
        if size and dict(size) == self.size_of(pool, self.settings):
            return
        self.sizes.pop(pool, None)
        self.picked.pop(pool, None)
        if size:
            self.picked[pool] = dict(size)

    def size_of(self, pool: str, here: Settings) -> dict[str, Any]:
        """How many ranks a cell gets on this pool that does not say, as `pick` has it."""
        filled = here.filled(Options(pool=pool))
        size: dict[str, Any] = {"gpus": filled.gpus, "ranks": filled.ranks, "gpu_type": filled.gpu_type}
        if pool in self.sizes:
            count, gpus = self.sizes[pool]
            size |= {"gpus": count if gpus else None, "ranks": None if gpus else count}
        return {name: value for name, value in size.items() if value}

    def close(self) -> None:
        """Give everything up: the agent ends this kernel's ranks, but for those of detached runs, which are followed
        to their end."""
        with self._lock:
            connections = list(self._connections)
            self._connections.clear()
        for connection in connections:
            for group in list(connection.groups.values()):
                if connection.runs and not (group.executing and group.executing.detached):
                    self.close_group(group)
                group.close("the extension was unloaded")
            connection.leave()


def _visible() -> tuple[str, ...] | None:
    """The GPUs that the notebook wants seen; None for all."""
    words = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if words is None else tuple(filter(None, words.split(",")))


def _notebook() -> str:
    """Its path, as far as the front end tells: Jupyter in the environment, VS Code by a name in the notebook."""
    return os.environ.get("JPY_SESSION_NAME") or str(getattr(sys.modules["__main__"], "__vsc_ipynb_file__", ""))
