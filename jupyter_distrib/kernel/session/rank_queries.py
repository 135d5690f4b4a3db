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
from jupyter_distrib.kernel.settings.choices import Choices
from jupyter_distrib.serialization import payload
from jupyter_distrib.wire import messages as m

GATHER = "from jupyter_distrib.worker.autoparallel.training import gather_shards\ngather_shards.of(__kept__)"
"""The source of the cell that fetches a sharded value."""


SHAPES = "from jupyter_distrib.serialization import tensors\ntensors.shapes_only = True\n__kept__"
"""The source of the cell that fetches values without the contents of their tensors on accelerators."""


class RankQueries:
    """The queries of one kernel.

    Args:
        start: Starts a cell, as `Session.start` does.
        choices: The pools that exist.
        runs: The history of the kernel, in which queries do not stay.
        pools: The ranks.
    """

    def __init__(
        self, start: Callable[[CellRequest], Run], choices: Choices, runs: RunHistory, pools: PoolManager
    ) -> None:
        self._start, self._choices, self._runs, self._pools = start, choices, runs, pools

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

    def shapes(self, handles: Mapping[str, RankValue]) -> dict[str, Any]:
        """Return kept values by key, from one rank: with shapes in place of tensors that are on an accelerator or
        sharded. Values of one group that share a tensor still do.

        Raises:
            PoolError: The ranks are busy, or gone, or a value cannot leave them.
        """
        found = dict[str, Any]()
        for group in self._pools.groups():
            here = {key: handle for key, handle in handles.items() if handle in group.handles and not handle.lost}
            if not here:
                continue
            if group.busy:
                raise selection.busy(group)
            rank = next(iter(here.values())).ranks[0]
            pool = group.connection.facts
            options = Options(on=(rank,), pool=pool.pool, strategy="none", pool_options=dict(pool.options))
            results = self._ask(SHAPES, options, "shapes of kept values", {"__kept__": here}, [*here.values()])
            found |= results[rank] if results is not None else {}
        for key, handle in handles.items():
            need = f"a dry run needs the shapes of `{handle.name}`"
            if key not in found:
                raise PoolError(f"{need}, whose ranks have ended: run the cell that keeps it again.")
            if isinstance(value := found[key], payload.Unreturned):
                raise PoolError(f"{need}, which its ranks cannot send ({value.reason}): make it in the cell.")
        return found

    def _ask(
        self, source: str, options: Options, label: str, values: Mapping[str, Any], handles: Sequence[RankValue]
    ) -> Results | None:
        cell, packed = m.Cell(source=source, filename=label), payload.pack_inputs(values, {})
        completed = self._choices.settings.completed(options)
        request = CellRequest(cell=cell, inputs=packed, options=completed, label=label, handles=handles, observed=False)
        run = self._start(request)
        self._runs.remove(run)
        found: Results | None = run.wait()
        return found
