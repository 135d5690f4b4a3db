"""The overview of this kernel for a front end, as JSON can carry it: the pools, the ranks that are up, the last runs,
and the options of the next run. Kernel side; a pure function of the session."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jupyter_distrib.kernel.record import failures
from jupyter_distrib.kernel.record.record import RankRecord, RunRecord
from jupyter_distrib.kernel.session.run import Run
from jupyter_distrib.kernel.session.session import Session
from jupyter_distrib.kernel.session.worker_group import WorkerGroup
from jupyter_distrib.kernel.settings.cell_options import DEFAULT_POOL, DEFAULT_STRATEGY, Options, to_line
from jupyter_distrib.kernel.settings.settings import NamedPool, Settings
from jupyter_distrib.system.formatting import clipped
from jupyter_distrib.wire.messages import WorkerInfo

PROTOCOL = 3
"""The version of the messages, raised when a page of another version would not understand the kernel."""
LINE_CHARACTERS = 200


def overview(session: Session, settings: Settings, answers: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the present overview.

    Args:
        session: The session of the kernel.
        settings: Its pools and defaults.
        answers: The last answer of each pool's agent, as `Connection.ask` returns it, with its time `at_s`.
    """
    return {
        "protocol": PROTOCOL,
        "session": session.identity.name,
        "label": session.identity.label,
        "pid": session.identity.pid,
        "next": _next(settings),
        "strategies": list(settings.strategies),
        "pools": [_pool(session, pool, answers.get(pool.name)) for pool in settings.pools.values()],
        "runs": [_run(run) for run in reversed(session.history)],
    }


def _next(settings: Settings) -> dict[str, Any]:
    """Return the options that a bare `%%distributed` uses, and the line that states them."""
    filled = settings.filled(Options())
    different = Options(
        strategy=filled.strategy if filled.strategy != DEFAULT_STRATEGY else None,
        pool=filled.pool if filled.pool != DEFAULT_POOL else None,
    ).resized(filled.size)
    return {
        "pool": filled.pool,
        "strategy": filled.strategy,
        "gpus": filled.gpus,
        "ranks": filled.ranks,
        "gpu_type": filled.gpu_type,
        "origins": settings.origins(Options()),
        "line": to_line(different),
    }


# ---------------------------------------------------------------------------------------------------- pools


def _pool(session: Session, pool: NamedPool, answer: Mapping[str, Any] | None) -> dict[str, Any]:
    groups = [_group(group) for group in session.pools.groups(pool.name)]
    return {
        "name": pool.name,
        "kind": pool.kind,
        "origin": pool.origin,
        "groups": groups,
        "node": _node(session, answer) if answer and answer.get("nodes") != () else None,
    }


def _group(group: WorkerGroup) -> dict[str, Any]:
    return {
        "name": group.name,
        "state": group.state,
        "size": group.size,
        "gpus": group.gpus,
        "kept": sorted({handle.name for handle in group.kept}),
        "run": group.run.id if group.run is not None and not group.run.done() else None,
        "ranks": [_worker(info) for info in group.workers],
    }


def _worker(info: WorkerInfo) -> dict[str, Any]:
    return {
        "rank": info.rank,
        "state": info.state,
        "pid": info.pid,
        "device": info.device,
        "device_name": info.device_name,
        "rss_bytes": info.rss_bytes,
        "node": info.node,
    }


def _node(session: Session, answer: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "at_s": answer["at_s"],
        "name": answer.get("name", ""),
        "cpus": answer.get("cpus"),
        "memory_bytes": answer.get("memory_bytes"),
        "gpus": [
            {key: gpu[key] for key in ("index", "number", "name", "memory_bytes", "used_bytes", "holder")}
            for gpu in answer["gpus"]
        ],
        "nodes": nodes_of(session, answer),
        "others": [
            {"holder": group["holder"], "ranks": len(group["workers"]), "running": group["label"]}
            for group in answer["groups"]
            if group["session"] != session.identity.name
        ],
    }


def nodes_of(session: Session, answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the nodes of a pool, each with `ranks`: the ranks of this notebook on it."""
    name = session.identity.name
    own_workers = [info for group in answer["groups"] if group["session"] == name for info in group["workers"]]
    if "nodes" in answer:
        return [
            {**node, "ranks": [info.rank for info in own_workers if info.node == node["name"]]}
            for node in answer["nodes"]
        ]
    return [{**_machine(answer), "ranks": [info.rank for info in own_workers]}] if answer.get("name") else []


def _machine(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the only node of a pool, in the form in which a coordinator describes each of its nodes."""
    gpus = answer["gpus"]
    return {
        "name": answer["name"],
        "cpus": answer["cpus"],
        "free_cpus": None,
        "memory_bytes": answer["memory_bytes"],
        "gpus": len(gpus),
        "free_gpus": sum(not gpu["holder"] for gpu in gpus),
        "gpu_type": ", ".join(dict.fromkeys(gpu["name"] for gpu in gpus)),
    }


# ---------------------------------------------------------------------------------------------------- runs


def _run(run: Run) -> dict[str, Any]:
    record = run.record
    return {
        "run": run.id,
        "label": record.label,
        "cell": run.cell_id,
        "state": run.state,
        "pool": run.pool,
        "strategy": record.strategy,
        "ranks": len(record.ranks),
        "numbers": list(record.ranks),
        "world_size": record.world_size,
        "gpus": record.gpus,
        "detached": run.detached,
        "began_at_s": run.clock.began_at_s,
        "elapsed_s": run.elapsed_s if run.done() else None,
        "stop_asked_at_s": run.stop_order.asked_at_s,
        "stopping": run.stopping,
        "peak_rss_bytes": record.peak_rss_bytes,
        "peak_gpu_memory_bytes": record.peak_gpu_memory_bytes,
        "stall": record.stall.text if record.stall else "",
        "trouble": _trouble(record),
        "progress": _slowest(record),
        "line": _last_line(record),
        # An ended run is shown in one line; of a running one people watch the ranks.
        "members": [] if run.done() else [_member(rank) for rank in record.ranks.values()],
    }


def _member(rank: RankRecord) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "state": rank.state,
        "device": rank.device_name or rank.device,
        "rss_bytes": rank.rss_bytes,
        "cpu_percent": rank.cpu_percent,
        "gpu_memory_bytes": rank.gpu_memory_bytes,
        "gpu_memory_total_bytes": rank.gpu_memory_total_bytes,
        "gpu_percent": rank.gpu_percent,
    }


def _slowest(record: RunRecord) -> dict[str, Any] | None:
    """Return the outermost loop of the rank that has made the least progress."""
    bars = [rank.progress[0] for rank in record.ranks.values() if rank.progress]
    if not bars:
        return None
    bar = min(bars, key=lambda each: each.step)
    return {"label": bar.label, "step": bar.step, "total": bar.total}


def _trouble(record: RunRecord) -> str:
    """Return the first failure in one line; empty if there is none."""
    number = failures.cause(record)
    if number is None:
        return ""
    return f"rank {number}: {clipped(failures.in_brief(record.ranks[number]), LINE_CHARACTERS)}"


def _last_line(record: RunRecord) -> str:
    return next((clipped(rank.last_line, LINE_CHARACTERS) for rank in record.ranks.values() if rank.last_line), "")
