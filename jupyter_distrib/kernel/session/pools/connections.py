"""The pools that this kernel has reached. Called from the thread that runs the cell; a pool that is lost is dropped in
that pool's own thread (`kernel/session/pools/connection.py`)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping

from jupyter_distrib.errors import DistributedError
from jupyter_distrib.kernel.session.pools.connection import Connection
from jupyter_distrib.kernel.session.pools.connection_facts import PoolAddress
from jupyter_distrib.kernel.session.pools.kernel_identity import KernelIdentity
from jupyter_distrib.kernel.settings.cell_options import DEFAULT_POOL
from jupyter_distrib.kernel.settings.choices import Choices
from jupyter_distrib.pools.local import RunningServer
from jupyter_distrib.pools.server_home import AGENT_NAME
from jupyter_distrib.system import open_files
from jupyter_distrib.system.run_list import ListedRun

HEAD_START_S = 0.1
"""The most seconds for which the thread that reaches the pool has the kernel to itself."""


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
        self._of_attached: list[Connection] = []
        """Connections to processes that hold detached runs and are no pool of this notebook."""
        self._lock = threading.RLock()

    def __iter__(self) -> Iterator[Connection]:
        """Iterate over the pools that are in use, in the order of their first use."""
        return iter(list(self._open))

    def connect(self, pool: str, options: Mapping[str, str] | None = None, group: str = "") -> Connection:
        """Reach a pool, once for each set of options. Raises `PoolError`.

        Args:
            pool: Its name.
            options: The options of its kind; None: those of its definition.
            group: The name of the worker group that is wanted, for which a pool counts that has moved since.
        """
        for connection in list(self._open):
            connection.wait_if_gone()  # it is dropped then, and the cell gets another agent
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
            with open_files.as_pool_error():
                connection = Connection(address, self._identity.hello(), on_lost=self._drop, on_change=self._on_change)
            self._open.append(connection)
            return connection

    def warm_up(self) -> None:
        """Reach the pool of the first cell while the user is still typing: the local agent imports torch, a coordinator
        joins its cluster. Called when the extension is loaded."""

        def connect() -> None:
            try:
                self.connect(self._choices.pool)
            except (DistributedError, OSError):
                return  # the first cell meets the same error and reports it

        thread = threading.Thread(target=connect, name="jupyter_distrib-warm-up", daemon=True)
        thread.start()
        thread.join(HEAD_START_S)  # it would take three times as long beside the imports that follow

    def reach(self, run: ListedRun) -> Connection:
        """Return a connection to the process that holds this detached run. Raises `PoolError`."""
        with self._lock:
            for connection in (*self._open, *self._of_attached):
                if connection.process == (run.pid_namespace, run.pid):
                    return connection
            kind = run.server.partition("-")[0]
            name = DEFAULT_POOL if kind == AGENT_NAME else kind
            connection = Connection(
                PoolAddress(name=name, kind=name, options={}),
                self._identity.hello(),
                opened=RunningServer(run.server),
                on_lost=self._drop,
                on_change=self._on_change,
            )
            self._of_attached.append(connection)
            return connection

    def take_all(self) -> list[Connection]:
        """Return all connections and forget them."""
        with self._lock:
            connections = [*self._open, *self._of_attached]
            self._open, self._of_attached = [], []
            return connections

    def _drop(self, connection: Connection) -> None:
        with self._lock:
            for connections in (self._open, self._of_attached):
                if connection in connections:
                    connections.remove(connection)
        self._on_change()
