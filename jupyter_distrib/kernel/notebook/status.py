"""The values that `%distributed_status` and `%distributed_pool list` show, as text and as HTML. Kernel side."""

from __future__ import annotations

import time
from dataclasses import dataclass
from html import escape
from typing import Any

from jupyter_distrib.kernel.session import detached
from jupyter_distrib.kernel.session.session import Session
from jupyter_distrib.kernel.sidebar.overview import nodes_of
from jupyter_distrib.kernel.views.table import TextTable
from jupyter_distrib.system.formatting import duration, rank_list, size
from jupyter_distrib.wire.messages import WorkerInfo

_RANKS = ("rank", "state", "device", "pid", "memory", "load", "node", "pool")
_NODES = ("node", "CPUs", "memory", "GPUs", "ranks", "pool")
_GPUS = ("GPU", "name", "memory", "mode", "held by")
_RUNS = ("run", "cell", "state", "time", "ranks", "peak memory")
_DETACHED = ("detached run", "cell", "state", "began before", "notebook")
_POOLS = ("pool", "kind", "in use", "ranks", "keeps", "from")


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The pools, ranks and runs at one moment."""

    pool: str
    strategy: str
    ranks: tuple[dict[str, Any], ...]
    """The ranks, each with `rank`, `state`, `device`, `pid`, `rss_bytes`, `node` (empty for one machine), `pool`;
    during a run also `cpu_percent`, and on a GPU `gpu_memory_bytes` and `gpu_percent`."""
    nodes: tuple[dict[str, Any], ...]
    """The nodes of the pools in use, each with `name`, `cpus`, `free_cpus`, `memory_bytes`, `gpus`, `free_gpus`,
    `gpu_type`, `ranks`, `pool`; the free amounts are None if they are unknown."""
    gpus: tuple[dict[str, Any], ...]
    """The GPUs of this machine, or slices of them, each with `index`, `number` (`3:1` for a slice), `name`,
    `memory_bytes` and `used_bytes` (None if unknown), `modes`, `holder`."""
    gpu_problems: tuple[str, ...]
    """Sentences on the reasons why GPUs of this machine cannot be used."""
    kept: tuple[str, ...]
    runs: tuple[dict[str, Any], ...]
    """The last runs, oldest first: `run`, `cell`, `state`, `elapsed_s`, `ranks`, `peak_rss_bytes`,
    `peak_gpu_memory_bytes`, and `stall`: the reason why no rank makes progress, or empty."""
    others: tuple[dict[str, Any], ...]
    """The worker groups of other notebooks on this node: `holder`, `ranks`, `running`, `kept`."""
    detached: tuple[dict[str, Any], ...]
    """The detached runs on this machine that are not among `runs`, in any pool: `run`, `cell`, `state`, `age_s`,
    `holder`."""
    agent: str

    @classmethod
    def of(cls, session: Session) -> Status:
        """Return the status, from every used pool's answer. Raises `PoolError` if a pool does not answer."""
        settings, pools = session.settings, session.pools
        connections = list(pools.connections) or [pools.connect(settings.pool)]
        answers = [(connection.pool, connection.ask()) for connection in connections]
        groups = [(pool, group) for pool, answer in answers for group in answer["groups"]]
        return cls(
            pool=settings.pool,
            strategy=settings.strategy_for(),
            ranks=tuple(
                {**_rank(info, pool), **_load(session, group["run"], info.rank)}
                for pool, group in groups
                if group["session"] == session.identity.name
                for info in group["workers"]
            ),
            nodes=tuple({**node, "pool": pool} for pool, answer in answers for node in nodes_of(session, answer)),
            gpus=tuple(gpu for _, answer in answers for gpu in answer["gpus"]),
            gpu_problems=tuple(filter(None, (answer.get("gpu_problem", "") for _, answer in answers))),
            kept=tuple(repr(handle) for group in pools.groups() for handle in group.kept),
            runs=tuple(
                {
                    "run": run.id,
                    "cell": run.record.label,
                    "state": run.state,
                    "elapsed_s": run.elapsed_s,
                    "ranks": len(run.record.ranks),
                    "peak_rss_bytes": run.record.peak_rss_bytes,
                    "peak_gpu_memory_bytes": run.record.peak_gpu_memory_bytes,
                    "stall": run.record.stall.text if run.record.stall else "",
                }
                for run in session.history
            ),
            others=tuple(
                {
                    "holder": group["holder"],
                    "ranks": len(group["workers"]),
                    "running": group["label"],
                    "kept": tuple(key.partition("/")[2] for key in group["kept"]),
                }
                for _, group in groups
                if group["session"] != session.identity.name
            ),
            detached=tuple(
                {
                    "run": run.run,
                    "cell": run.label,
                    "state": "ended" if run.ended else "running",
                    "age_s": time.time() - run.began_at_s,
                    "holder": run.holder,
                }
                for run in detached.runs()
                if all(run.run != each.id for each in session.history)
            ),
            agent="; ".join(_agent(pool, answer, alone=len(answers) == 1) for pool, answer in answers),
        )

    def _tables(self) -> list[TextTable]:
        ranks = [
            (
                str(r["rank"]),
                r["state"],
                r["device"],
                str(r["pid"]),
                size(r["rss_bytes"]),
                _load_text(r),
                r["node"],
                r["pool"],
            )
            for r in self.ranks
        ]
        runs = [
            (r["run"], r["cell"], r["state"], duration(r["elapsed_s"]), str(r["ranks"]), _peak(r))
            for r in reversed(self.runs)
        ]
        gpus = [(g["number"], g["name"], _gpu_memory(g), g["modes"], g["holder"] or "free") for g in self.gpus]
        others = [(o["holder"], str(o["ranks"]), o["running"] or "idle", ", ".join(o["kept"])) for o in self.others]
        detached_runs = [(d["run"], d["cell"], d["state"], duration(d["age_s"]), d["holder"]) for d in self.detached]
        tables = (
            TextTable(head=_RANKS, rows=ranks).without_empty("node"),
            TextTable(head=_NODES, rows=[_node(node) for node in self.nodes]),
            TextTable(head=_GPUS, rows=gpus).without_empty("mode"),
            TextTable(head=("other notebook", "ranks", "runs", "keeps"), rows=others),
            TextTable(head=_RUNS, rows=runs),
            TextTable(head=_DETACHED, rows=detached_runs),
        )
        return [table for table in tables if table.rows]

    def _head(self) -> list[str]:
        head = [f"pool {self.pool}, strategy {self.strategy}; {self.agent}"]
        head += [f"GPUs: {problem}" for problem in self.gpu_problems]
        if not self.ranks:
            head.append("No ranks are up; the next %%distributed cell starts them.")
        stalls = [f"{run['cell']}: {run['stall']}" for run in self.runs if run["state"] == "running" and run["stall"]]
        return [*head, *stalls, *self.kept]

    def __repr__(self) -> str:
        return "\n\n".join(["\n".join(self._head()), *(table.as_text() for table in self._tables())])

    def _repr_html_(self) -> str:
        head = "".join(f"<div>{escape(line)}</div>" for line in self._head())
        return head + "".join(table.as_html() for table in self._tables())


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolTable:
    """The pools that a cell can name, with this notebook's ranks on each."""

    rows: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, session: Session) -> PoolTable:
        settings = session.settings
        rows = []
        for name, pool in settings.pools.items():
            groups = session.pools.groups(name)
            ranks = ", ".join(f"{group.size} {'GPU' if group.gpus else 'CPU'}" for group in groups if group.size)
            kept = ", ".join(handle.name for group in groups for handle in group.kept)
            in_use = "yes" if name == settings.pool else ""
            rows.append((name, pool.kind, in_use, ranks or "none up", kept, pool.origin))
        return cls(rows=tuple(rows))

    def __repr__(self) -> str:
        return self._table().as_text()

    def _repr_html_(self) -> str:
        return self._table().as_html()

    def _table(self) -> TextTable:
        return TextTable(head=_POOLS, rows=self.rows)


def _load(session: Session, run: str, rank: int) -> dict[str, Any]:
    """Return a rank's last known usage in the current run."""
    record = next((each.record for each in session.history if each.id == run), None)
    if record is None or rank not in record.ranks:
        return {}
    now = record.ranks[rank]
    gpu = {"gpu_memory_bytes": now.gpu_memory_bytes, "gpu_percent": now.gpu_percent}
    return {"cpu_percent": now.cpu_percent, **({} if now.gpu_memory_bytes is None else gpu)}


def _load_text(rank: dict[str, Any]) -> str:
    """Format a rank's usage: `98 % cpu, 6.4 GB and 75 % gpu`."""
    if "cpu_percent" not in rank:
        return ""
    parts = [f"{rank['cpu_percent']:.0f} % cpu"]
    if "gpu_memory_bytes" in rank:
        percent = "" if rank["gpu_percent"] is None else f" and {rank['gpu_percent']:.0f} %"
        parts.append(f"{size(rank['gpu_memory_bytes'])}{percent} gpu")
    return ", ".join(parts)


def _peak(run: dict[str, Any]) -> str:
    """Format the peak memory of all ranks of a run together; empty for a run that ended before it was sampled."""
    gpu = "" if run["peak_gpu_memory_bytes"] is None else f", gpu {size(run['peak_gpu_memory_bytes'])}"
    return f"{size(run['peak_rss_bytes'])}{gpu}" if run["peak_rss_bytes"] else ""


def _agent(pool: str, answer: dict[str, Any], *, alone: bool) -> str:
    text = f"agent {answer['pid']}, up {duration(answer['up_s'])}, {answer['state']}"
    return text if alone else f"{pool}: {text}"


def _rank(info: WorkerInfo, pool: str) -> dict[str, Any]:
    return {
        "rank": info.rank,
        "state": info.state,
        "device": info.device_name or info.device,
        "pid": info.pid,
        "rss_bytes": info.rss_bytes,
        "node": info.node,
        "pool": pool,
    }


def _node(node: dict[str, Any]) -> tuple[str, ...]:
    def count(kind: str, what: str = "") -> str:
        free = node[f"free_{kind}"]
        return f"{node[kind]:g}{what and f' {what}'}{'' if free is None else f', {free:g} free'}"

    return (
        node["name"],
        count("cpus"),
        size(node["memory_bytes"]),
        count("gpus", node["gpu_type"]) if node["gpus"] else "none",
        rank_list(node["ranks"]).partition(" ")[2] if node["ranks"] else "",
        node["pool"],
    )


def _gpu_memory(gpu: dict[str, Any]) -> str:
    """Format the used part of a GPU's memory, which some drivers do not report."""
    if gpu["memory_bytes"] is None or gpu["used_bytes"] is None:
        return "unknown"
    return f"{size(gpu['used_bytes'])} of {size(gpu['memory_bytes'])}"
