"""The values that `%distributed_status` and `%distributed_pool list` show, as text and as HTML. Kernel side."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from jupyter_distrib.kernel.session import detached, machines
from jupyter_distrib.kernel.session.machines import MachineStatus
from jupyter_distrib.kernel.session.session import Session
from jupyter_distrib.kernel.session.status import (
    DetachedStatus,
    OtherGroup,
    PoolStatus,
    RankStatus,
    RankUsage,
    RunStatus,
    detached_elsewhere,
    other_groups,
    pool_status,
)
from jupyter_distrib.kernel.views import markup
from jupyter_distrib.kernel.views.table import TextTable
from jupyter_distrib.system.formatting import clipped, duration, rank_list, size
from jupyter_distrib.wire import messages as m

_RANKS = ("rank", "state", "device", "pid", "memory", "load", "node", "pool")
_NODES = ("node", "CPUs", "memory", "GPUs", "ranks", "held by", "pool")
_WAITING = ("waiting", "ranks", "for", "pool")
_GPUS = ("GPU", "name", "memory", "mode", "held by")
_OTHERS = ("other notebook", "ranks", "runs", "keeps")
_SETUPS = ("set-up", "cell", "begins with")
_NO_SETUPS = "This notebook has no set-ups."
_RUNS = ("run", "cell", "state", "time", "ranks", "peak memory")
_DETACHED = ("detached run", "cell", "state", "began before", "notebook", "where")
_POOLS = ("pool", "kind", "in use", "ranks", "keeps", "machines", "from")
_MACHINES = ("machines", "state", "cost", "hosts", "end")


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The pools, ranks and runs at one moment.

    It holds data only, so that `dataclasses.asdict` gives what JSON can carry.
    """

    pool: str
    strategy: str
    pools: tuple[PoolStatus, ...]
    """The pools in use."""
    kept: tuple[str, ...]
    """Descriptions of the values that live on this notebook's ranks."""
    setups: tuple[tuple[str, ...], ...]
    """The set-ups of the notebook: name, cell and first line of each."""
    cache_bytes: int
    """Memory on this machine for large values that were sent to the ranks, so that they are not sent again."""
    runs: tuple[RunStatus, ...]
    """The last runs, oldest first."""
    others: tuple[OtherGroup, ...]
    """The worker groups of other notebooks in these pools."""
    detached: tuple[DetachedStatus, ...]
    """The detached runs on this machine that are not among `runs`."""
    machines: tuple[MachineStatus, ...]
    """The machines of this user that pools have started."""
    damage: str
    """A sentence on unreadable entries of detached runs; empty if there are none."""
    trouble: str
    """A sentence on settings files that cannot be read now; empty if they can."""

    @classmethod
    def of(cls, session: Session) -> Status:
        """Return the status from the answers of all used pools. Raises `PoolError` if a pool does not answer."""
        (settings, trouble), connections = session.choices.readable_settings(), session.pools.connections
        used = list(connections) or ([] if trouble else [session.pools.connect(settings.pool)])
        pools = tuple(pool_status(connection, session) for connection in used)
        return cls(
            pool=settings.pool,
            strategy=settings.strategy_for(),
            pools=pools,
            kept=tuple(repr(handle) for group in session.pools.groups() for handle in group.kept),
            setups=tuple(_setup_row(each.setup) for each in session.setups.registered),
            cache_bytes=session.sent_values.size_bytes,
            runs=tuple(RunStatus.of(run) for run in session.history),
            others=other_groups(pools, session),
            detached=detached_elsewhere(session),
            machines=machines.statuses(settings),
            damage=detached.damage(),
            trouble=trouble,
        )

    @property
    def ranks(self) -> tuple[RankStatus, ...]:
        """Return the ranks of this notebook in all pools."""
        return tuple(rank for pool in self.pools for rank in pool.ranks)

    @property
    def agent(self) -> str:
        """Return a line about the process of each pool: `agent 4242, up 3 min, forkserver ready`."""
        return "; ".join(_server_text(pool, alone=len(self.pools) == 1) for pool in self.pools)

    def _tables(self) -> list[TextTable]:
        gpus = [gpu for pool in self.pools for gpu in pool.server.gpus]
        nodes = [_node_row(pool, node) for pool in self.pools for node in pool.nodes]
        waiting = [_waiting_row(pool, each) for pool in self.pools for each in pool.server.waiting]
        others = [(o.holder, str(o.ranks), o.running or "idle", ", ".join(o.kept)) for o in self.others]
        tables = (
            TextTable(head=_RANKS, rows=[_rank_row(rank) for rank in self.ranks]).without_empty("node"),
            TextTable(head=_NODES, rows=nodes).without_empty("held by"),
            TextTable(head=_GPUS, rows=[_gpu_row(gpu) for gpu in gpus]).without_empty("mode"),
            TextTable(head=_MACHINES, rows=[_machine_row(each) for each in self.machines]).without_empty("cost"),
            TextTable(head=_WAITING, rows=waiting),
            TextTable(head=_OTHERS, rows=others),
            TextTable(head=_SETUPS, rows=self.setups),
            TextTable(head=_RUNS, rows=[_run_row(run) for run in reversed(self.runs)]),
            TextTable(head=_DETACHED, rows=[_detached_row(run) for run in self.detached]).without_empty("where"),
        )
        return [table for table in tables if table.rows]

    def _head(self) -> list[str]:
        head = [f"pool {self.pool}, strategy {self.strategy}; {self.agent}"]
        head += [f"GPUs: {pool.server.gpu_problem}" for pool in self.pools if pool.server.gpu_problem]
        alone = len(self.pools) == 1
        head += [
            f"next rank{'' if alone else f' of {each.name}'}: {each.next_rank}" for each in self.pools if each.next_rank
        ]
        if not self.ranks:
            head.append("No ranks are up; the next %%distributed cell starts them.")
        stalls = [f"{run.label}: {run.stall}" for run in self.runs if run.state == "running" and run.stall]
        if self.cache_bytes:
            head.append(
                f"{size(self.cache_bytes)} of memory hold values that are not sent again while they do not change."
            )
        problems = [f"MACHINES of {each.pool or each.down}: {each.problem}" for each in self.machines if each.problem]
        if self.trouble:
            problems.append(self.trouble)
        return [*problems, *head, *stalls, *self.kept, *filter(None, [self.damage])]

    def __repr__(self) -> str:
        return "\n\n".join(["\n".join(self._head()), *(table.as_text() for table in self._tables())])

    def _repr_html_(self) -> str:
        head = "".join(f"<div>{escape(line)}</div>" for line in self._head())
        return markup.inert(head) + "".join(table.as_html() for table in self._tables())


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolTable:
    """The pools that a cell can name, with this notebook's ranks on each."""

    rows: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, session: Session) -> PoolTable:
        settings, _ = session.choices.readable_settings()
        rows = []
        for pool in session.usable_pools(settings):
            name = pool.name
            groups = session.pools.groups(name)
            ranks = ", ".join(f"{group.size} {'GPU' if group.gpus else 'CPU'}" for group in groups if group.size)
            kept = ", ".join(handle.name for group in groups for handle in group.kept)
            in_use = "yes" if name == settings.pool else ""
            rows.append((name, pool.kind, in_use, ranks or "none up", kept, machines.of_pool(pool), pool.origin))
        return cls(rows=tuple(rows))

    def __repr__(self) -> str:
        return self._table().as_text()

    def _repr_html_(self) -> str:
        return self._table().as_html()

    def _table(self) -> TextTable:
        return TextTable(head=_POOLS, rows=self.rows).without_empty("machines")


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupTable:
    """The set-ups of the notebook."""

    rows: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, session: Session) -> SetupTable:
        return cls(rows=tuple(_setup_row(each.setup) for each in session.setups.registered))

    def __repr__(self) -> str:
        return self._table().as_text() if self.rows else _NO_SETUPS

    def _repr_html_(self) -> str:
        return self._table().as_html() if self.rows else markup.inert(_NO_SETUPS)

    def _table(self) -> TextTable:
        return TextTable(head=_SETUPS, rows=self.rows)


def _setup_row(setup: m.Setup) -> tuple[str, ...]:
    lines = setup.cell.source.splitlines()
    return setup.name, setup.cell.filename, clipped(next((line for line in lines if line.strip()), "").strip(), 80)


def _server_text(pool: PoolStatus, *, alone: bool) -> str:
    server = pool.server
    text = f"agent {server.pid}, up {duration(server.up_s)}, {server.state}"
    return text if alone else f"{pool.name}: {text}"


def _rank_row(rank: RankStatus) -> tuple[str, ...]:
    return (
        str(rank.rank),
        rank.state,
        rank.device_name or rank.device,
        str(rank.pid),
        size(rank.rss_bytes),
        _load(rank.usage),
        rank.node,
        rank.pool,
    )


def _load(usage: RankUsage | None) -> str:
    """Format a rank's usage: `98 % cpu, 6.4 GB and 75 % gpu, tensors 5 GB`."""
    if usage is None:
        return ""
    parts = [f"{usage.cpu_percent:.0f} % cpu"]
    if usage.gpu_memory_bytes is not None:
        percent = "" if usage.gpu_percent is None else f" and {usage.gpu_percent:.0f} %"
        parts.append(f"{size(usage.gpu_memory_bytes)}{percent} gpu{' (all processes)' * usage.gpu_memory_of_all}")
    if usage.gpu_tensor_bytes is not None:
        parts.append(f"tensors {size(usage.gpu_tensor_bytes)}")
    return ", ".join(parts)


def _node_row(pool: PoolStatus, node: m.NodeStatus) -> tuple[str, ...]:
    def amount(count: float, free: float | None, kind: str = "") -> str:
        return f"{count:g}{kind and f' {kind}'}{'' if free is None else f', {free:g} free'}"

    ranks = pool.ranks_on(node)
    return (
        f"{node.name} ({node.state})" if node.state else node.name,
        amount(node.cpus, node.free_cpus) if node.cpus else "",
        size(node.memory_bytes) if node.memory_bytes else "",
        amount(node.gpus, node.free_gpus, node.gpu_type) if node.gpus else "none" if node.cpus else "",
        rank_list(ranks).partition(" ")[2] if ranks else "",
        "; ".join(pool.holders_on(node)),
        pool.name,
    )


def _waiting_row(pool: PoolStatus, each: m.WaitingStatus) -> tuple[str, ...]:
    ranks = f"{each.ranks or ''} {'GPU' if each.gpus else 'CPU'}".strip()
    return (each.holder, ranks, each.reason, pool.name)


def _machine_row(each: MachineStatus) -> tuple[str, ...]:
    cost = f"{each.cost:.2f}" if each.price else ""
    return (each.pool or each.down, each.text, cost, each.hosts, each.end)


def _gpu_row(gpu: m.GpuStatus) -> tuple[str, ...]:
    return (gpu.number, gpu.name, _gpu_memory(gpu), gpu.modes, gpu.holder or "free")


def _gpu_memory(gpu: m.GpuStatus) -> str:
    """Format the used GPU memory, which some drivers do not report."""
    if gpu.memory_bytes is None or gpu.used_bytes is None:
        return "unknown"
    return f"{size(gpu.used_bytes)} of {size(gpu.memory_bytes)}"


def _run_row(run: RunStatus) -> tuple[str, ...]:
    return (run.run, run.label, run.state, duration(run.elapsed_s), str(run.ranks), _peak(run))


def _peak(run: RunStatus) -> str:
    """Format the peak memory of all ranks of a run together; empty if the run ended before a sample was taken."""
    gpu = "" if run.peak_gpu_memory_bytes is None else f", gpu {size(run.peak_gpu_memory_bytes)}"
    return f"{size(run.peak_rss_bytes)}{gpu}" if run.peak_rss_bytes else ""


def _detached_row(run: DetachedStatus) -> tuple[str, ...]:
    return (run.run, run.label, "ended" if run.ended else "running", duration(run.age_s), run.holder, run.where)
