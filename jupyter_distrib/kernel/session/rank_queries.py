"""Queries: short runs that fetch values from ranks and leave no trace in the notebook. In the thread that asks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jupyter_distrib.errors import PoolError
from jupyter_distrib.kernel.session.cell_order import CellRequest
from jupyter_distrib.kernel.session.pools import selection
from jupyter_distrib.kernel.session.pools.connection import WorkerGroup
from jupyter_distrib.kernel.session.pools.pool_manager import PoolManager
from jupyter_distrib.kernel.session.runs.results import RankValue, Results
from jupyter_distrib.kernel.session.runs.run import Run
from jupyter_distrib.kernel.session.runs.run_history import RunHistory
from jupyter_distrib.kernel.settings.cell_options import Options
from jupyter_distrib.serialization import payload
from jupyter_distrib.wire import messages as m

GATHER = "from jupyter_distrib.worker.autoparallel.training import gather_shards\ngather_shards.of(__kept__)"
"""The source of the cell that fetches a sharded value."""


class RankQueries:
    """The queries of one kernel.

    Args:
        start: Starts a cell, as `Session.start` does.
        runs: The history of the kernel, in which queries do not stay.
        pools: The ranks.
    """

    def __init__(self, start: Callable[[CellRequest], Run], runs: RunHistory, pools: PoolManager) -> None:
        self._start, self._runs, self._pools = start, runs, pools

    def fetch(self, group: WorkerGroup, key: str, rank: int) -> Any:
        """Fetch a copy of one rank's kept value by a run on that rank, or on all ranks if each holds a shard."""
        handle = next(handle for handle in group.handles if handle.key == key)
        if group.busy:
            raise selection.busy(group)
        pool = group.connection.facts
        on, source, home = ((rank,), "__kept__", rank) if not handle.sharded else (None, GATHER, 0)
        options = Options(on=on, pool=pool.pool, strategy="none", pool_options=dict(pool.options))
        label = f"{handle.name}[{rank}]"
        results = self._ask(source, options, label, {"__kept__": handle}, [handle])
        return None if results is None else results[home]

    def ask_ranks(self, group: WorkerGroup, source: str, label: str) -> Results | None:
        """Execute a source on all ranks of an idle group, in a run that leaves no trace; return the values."""
        pool = group.connection.facts
        options = Options(pool=pool.pool, strategy="none", pool_options=dict(pool.options)).resized(group.asked.size)
        return self._ask(source, options, label, {}, ())

    def ask_holders(self, handle: RankValue, source: str) -> Results:
        """Execute a source on the ranks of a kept value, where `__kept__` is their own copy; return the values.

        Raises:
            PoolError, ValueLost: They are busy, or gone.
        """
        group = next((group for group in self._pools.groups() if handle in group.handles), None)
        if group is None or group.busy:
            raise PoolError(f"the ranks of `{handle.name}` have ended.") if group is None else selection.busy(group)
        pool = group.connection.facts
        options = Options(on=handle.ranks, pool=pool.pool, strategy="none", pool_options=dict(pool.options))
        results = self._ask(source, options, f"{handle.name} on its ranks", {"__kept__": handle}, [handle])
        assert results is not None
        return results

    def _ask(
        self, source: str, options: Options, label: str, values: Mapping[str, Any], handles: Sequence[RankValue]
    ) -> Results | None:
        cell, packed = m.Cell(source=source, filename=label), payload.pack_inputs(values, {})
        request = CellRequest(cell=cell, inputs=packed, options=options, label=label, handles=handles, observed=False)
        run = self._start(request)
        self._runs.remove(run)
        found: Results | None = run.wait()
        return found
