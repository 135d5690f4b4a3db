"""The status of a pool, its ranks and runs, as known to this kernel. Kernel side; no text, no display.

`%distributed_status`, its `--doctor` and the sidebar take their rows from these classes. What a pool's process tells of
itself is in `wire/messages/status.py`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable

from jupyter_distrib.kernel.record.rank_record import RankRecord
from jupyter_distrib.kernel.session import detached
from jupyter_distrib.kernel.session.pools.connection import Connection
from jupyter_distrib.kernel.session.pools.next_rank import next_rank
from jupyter_distrib.kernel.session.runs.run import Run
from jupyter_distrib.kernel.session.session import Session
from jupyter_distrib.system.data_class import data_class
from jupyter_distrib.wire import messages as m


@data_class
class RankUsage:
    """The last measured usage of a rank in its run."""

    cpu_percent: float
    """The processor usage; 100 is one core."""
    gpu_memory_bytes: int | None
    """Memory used by the rank on its GPU; None for a CPU rank, and where the driver does not report it."""
    gpu_memory_total_bytes: int | None
    gpu_percent: float | None
    gpu_tensor_bytes: int | None
    """Memory of the rank's tensors there, as its framework counts; None if unknown."""
    gpu_reserved_bytes: int | None
    """Memory that the framework holds, including its reserve."""
    gpu_memory_of_all: bool
    """Whether `gpu_memory_bytes` is the growth of the whole GPU's use since the rank's start, as in containers."""

    @classmethod
    def of(cls, rank: RankRecord) -> RankUsage:
        return cls(
            cpu_percent=rank.cpu_percent,
            gpu_memory_bytes=rank.gpu_memory_bytes,
            gpu_memory_total_bytes=rank.gpu_memory_total_bytes,
            gpu_percent=rank.gpu_percent,
            gpu_tensor_bytes=rank.gpu_tensor_bytes,
            gpu_reserved_bytes=rank.gpu_reserved_bytes,
            gpu_memory_of_all=rank.gpu_memory_of_all,
        )


@data_class
class RankStatus:
    """One rank of this notebook."""

    rank: int
    state: str
    """The state: `starting`, `idle`, `running` or `gone`."""
    device: str
    device_name: str
    pid: int
    rss_bytes: int
    node: str
    """Machine of the rank; empty if its pool has only one."""
    pool: str
    usage: RankUsage | None
    """Its usage; None if it executes no run of this notebook."""

    @classmethod
    def of(cls, info: m.WorkerInfo, pool: str, usage: RankUsage | None) -> RankStatus:
        return cls(**m.fields_of(info), pool=pool, usage=usage)


@data_class
class PoolStatus:
    """A pool in use, with the answer of its process."""

    name: str
    at_s: float
    """Time of the answer in seconds since the epoch."""
    server: m.ServerStatus
    ranks: tuple[RankStatus, ...]
    """The ranks of this notebook."""
    session: str
    """The name under which this kernel identifies its worker groups."""

    @classmethod
    def of(cls, name: str, server: m.ServerStatus, session: Session) -> PoolStatus:
        """Return the status of a pool that has just answered."""
        ranks = [
            RankStatus.of(info, name, _usage(session, group.run, info.rank))
            for group in server.groups
            if group.session == session.identity.name
            for info in group.workers
        ]
        return cls(name=name, at_s=time.time(), server=server, ranks=tuple(ranks), session=session.identity.name)

    @property
    def nodes(self) -> tuple[m.NodeStatus, ...]:
        """Return the machines of the pool, as far as they are known."""
        return self.server.nodes or ()

    @property
    def next_rank(self) -> str:
        """Return what one more rank would get; empty if unknown."""
        return next_rank(self.server)

    def holders_on(self, node: m.NodeStatus) -> list[str]:
        """Return the known holders of parts of a machine, except this notebook."""
        if node.holders:
            return list(node.holders)
        counts: Counter[str] = Counter()
        for group in self.server.groups:
            counts[group.holder] += sum(worker.node in ("", node.name) for worker in group.workers)
        own = {group.holder for group in self.server.groups if group.session == self.session}
        return [
            f"{holder}, {count} rank{'s' * (count > 1)}"
            for holder, count in counts.items()
            if count and holder not in own
        ]

    def ranks_on(self, node: m.NodeStatus) -> list[int]:
        """Return the ranks of this notebook on a machine of the pool."""
        return [rank.rank for rank in self.ranks if rank.node in ("", node.name)]


def pool_status(connection: Connection, session: Session) -> PoolStatus:
    """Ask a pool for its status. Raises `PoolError` if it does not answer."""
    return PoolStatus.of(connection.facts.pool, connection.ask(), session)


def _usage(session: Session, run: str, rank: int) -> RankUsage | None:
    record = next((each.record for each in session.history if each.id == run), None)
    return RankUsage.of(record.ranks[rank]) if record is not None and rank in record.ranks else None


@data_class
class OtherGroup:
    """A worker group of another notebook."""

    holder: str
    ranks: int
    """The number of its ranks."""
    running: str
    """The label of the cell that it executes; empty if it is idle."""
    kept: tuple[str, ...]
    """The names of the values that live on its ranks."""

    @classmethod
    def of(cls, group: m.GroupStatus) -> OtherGroup:
        kept = tuple(key.partition("/")[2] for key in group.kept)
        return cls(holder=group.holder, ranks=len(group.workers), running=group.label, kept=kept)


def other_groups(pools: Iterable[PoolStatus], session: Session) -> tuple[OtherGroup, ...]:
    """Return the worker groups of other notebooks that these pools serve."""
    groups = (group for pool in pools for group in pool.server.groups)
    return tuple(OtherGroup.of(group) for group in groups if group.session != session.identity.name)


@data_class
class RunStatus:
    """One run of this notebook."""

    run: str
    label: str
    """The cell: `Cell In[5]`."""
    state: str
    pool: str
    strategy: str
    ranks: int
    """The number of its ranks."""
    world_size: int
    gpus: bool
    detached: bool
    elapsed_s: float
    peak_rss_bytes: int
    """Peak memory of all its ranks together; 0 if it ended before it was measured."""
    peak_gpu_memory_bytes: int | None
    stall: str
    """The reason why no rank makes progress, or empty."""

    @classmethod
    def of(cls, run: Run) -> RunStatus:
        record = run.record
        return cls(
            run=run.id,
            label=record.label,
            state=run.state,
            pool=run.pool,
            strategy=record.strategy,
            ranks=len(record.ranks),
            world_size=record.world_size,
            gpus=record.gpus,
            detached=run.detached,
            elapsed_s=run.elapsed_s,
            peak_rss_bytes=record.peak_rss_bytes,
            peak_gpu_memory_bytes=record.peak_gpu_memory_bytes,
            stall=record.stall.text if record.stall else "",
        )


@data_class
class DetachedStatus:
    """One detached run on this machine, in any pool, of any notebook."""

    run: str
    label: str
    ended: bool
    age_s: float
    """Seconds since it began."""
    holder: str
    """The notebook that began it."""
    where: str
    """Its place, if in another container, job or control group than this kernel's; else empty."""


def detached_elsewhere(session: Session) -> tuple[DetachedStatus, ...]:
    """Return the detached runs on this machine that are not among this notebook's runs. Raises `PoolError`."""
    own, now_s = {run.id for run in session.history}, time.time()
    return tuple(
        DetachedStatus(
            run=run.run,
            label=run.label,
            ended=run.ended,
            age_s=now_s - run.began_at_s,
            holder=run.holder,
            where=detached.elsewhere(run),
        )
        for run in detached.runs()
        if run.run not in own
    )
