"""The overview of this kernel for a front end, as JSON can carry it: the pools, the ranks that are up, the last runs,
and the options of the next run; and the list of saved runs. Kernel side; functions of the session and of
the history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jupyter_distrib import addresses
from jupyter_distrib.kernel.analysis import failures
from jupyter_distrib.kernel.history import run_files
from jupyter_distrib.kernel.history.listing import SHOWN, matching
from jupyter_distrib.kernel.history.saved_run import phrases_on_not_finite
from jupyter_distrib.kernel.record.nested_progress import seconds_left
from jupyter_distrib.kernel.record.rank_record import RankRecord
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.kernel.session import machines
from jupyter_distrib.kernel.session.pools.connection import GroupState, WorkerGroup
from jupyter_distrib.kernel.session.runs.run import Run
from jupyter_distrib.kernel.session.session import Session
from jupyter_distrib.kernel.session.status import PoolStatus, RankUsage, RunStatus, other_groups
from jupyter_distrib.kernel.settings.available import POOLS
from jupyter_distrib.kernel.settings.cell_options import DEFAULT_POOL, DEFAULT_STRATEGY, Options
from jupyter_distrib.kernel.settings.settings import BUILT_IN, NOTEBOOK, NamedPool, ProjectFile, Settings
from jupyter_distrib.kernel.settings.written_options import to_line
from jupyter_distrib.pools.base import capabilities_of
from jupyter_distrib.system import gpu_devices
from jupyter_distrib.system.formatting import clipped
from jupyter_distrib.wire import messages as m

PROTOCOL = 4
"""Version of the messages; raised when pages of other versions would not understand the kernel."""
LINE_CHARACTERS = 200
_ROWS = 500
"""Number of runs of the table of saved ones."""


@dataclass(slots=True)
class UnchangedParts:
    """The parts of the last overview that change only with their sources; overviews are made several times a second."""

    settings: Settings | None = None
    next: dict[str, Any] = field(default_factory=dict)
    """Options of the next run under these settings."""
    strategies: list[str] = field(default_factory=list)
    pools: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The parts of each pool that follow from these settings, by name."""
    ended: dict[Run, dict[str, Any]] = field(default_factory=dict)
    """The runs that have ended."""


def overview(
    session: Session,
    settings: Settings,
    pools: Mapping[str, PoolStatus],
    unchanged: UnchangedParts | None = None,
) -> dict[str, Any]:
    """Return the current overview.

    Args:
        session: The session of the kernel.
        settings: Its pools and defaults.
        pools: The last status of each pool.
        unchanged: Parts of an earlier overview, which are used and replaced.
    """
    unchanged = UnchangedParts() if unchanged is None else unchanged
    if unchanged.settings is not settings:
        unchanged.settings, unchanged.next, unchanged.pools = settings, _next(settings), {}
        unchanged.strategies = list(settings.strategies)
    groups: dict[str, list[dict[str, Any]]] = {}
    for group in session.pools.groups():
        groups.setdefault(group.connection.facts.pool, []).append(_group(group))
    return {
        "protocol": PROTOCOL,
        "session": session.identity.name,
        "label": session.identity.label,
        "pid": session.identity.pid,
        "next": unchanged.next,
        "strategies": unchanged.strategies,
        "pools": [
            {
                **(unchanged.pools.get(pool.name) or unchanged.pools.setdefault(pool.name, _pool(pool))),
                "groups": groups.get(pool.name, []),
                "machines": machines.of_pool(pool) if "up" in pool.options else "",
                "node": _node(session, status)
                if (status := pools.get(pool.name)) and status.server.nodes is not None
                else None,
            }
            for pool in session.usable_pools(settings)
        ],
        "starts": [m.fields_of(start) for start in session.pools.starts if _is_start(groups.get(start.pool, []))],
        "waits": settings.waiting and _waits(settings.waiting),
        "runs": _runs(session.history, unchanged),
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


def _pool(pool: NamedPool) -> dict[str, Any]:
    return {
        "name": pool.name,
        "kind": pool.kind,
        "origin": pool.origin,
        "where": _where(pool),
        "editable": pool.origin not in (BUILT_IN, NOTEBOOK),
        "waits": pool.project_file and _waits(pool.project_file),
        "no_gpu": not capabilities_of(pool.kind).remote and not gpu_devices.may_exist(),
    }


def _where(pool: NamedPool) -> str:
    """Return where a pool's ranks are, in a few words: the options that most people set for its kind."""
    if not pool.options:
        return ""
    main = [option.name for option in POOLS[pool.kind] if option.main and option.name in pool.options]
    return clipped(", ".join(f"{name} {addresses.shown(pool.options[name])}".strip() for name in main), LINE_CHARACTERS)


def _waits(file: ProjectFile) -> dict[str, str]:
    """Return the part of a project's file that waits for the user's trust."""
    return {"file": file.shown, "sets": file.sets, "digest": file.digest}


def _group(group: WorkerGroup) -> dict[str, Any]:
    return {
        "name": group.name,
        "state": group.state.value,
        "size": group.size,
        "gpus": group.gpus,
        "kept": sorted({handle.name for handle in group.kept}),
        "run": group.run.id if group.run is not None and not group.run.done() else None,
        "ranks": [m.fields_of(info) for info in group.workers],
        "starting": m.fields_of(group.starting) if group.state is GroupState.OPENING and group.starting else None,
    }


def _is_start(groups: Sequence[dict[str, Any]]) -> bool:
    """Return whether a cell that waits for ranks of a pool with these groups has to wait for their start."""
    return not groups or any(group["state"] == GroupState.OPENING.value for group in groups)


def _node(session: Session, pool: PoolStatus) -> dict[str, Any]:
    server = pool.server
    return {
        "at_s": pool.at_s,
        "name": server.name,
        "cpus": sum(node.cpus for node in pool.nodes),
        "memory_bytes": sum(node.memory_bytes for node in pool.nodes),
        "gpus": [m.fields_of(gpu) for gpu in server.gpus],
        "nodes": [
            {**m.fields_of(node), "ranks": pool.ranks_on(node), "holders": pool.holders_on(node)} for node in pool.nodes
        ],
        "next_rank": pool.next_rank,
        "waiting": [m.fields_of(each) for each in server.waiting],
        "others": [m.fields_of(other) for other in other_groups([pool], session)],
    }


# ---------------------------------------------------------------------------------------------------- runs


def _runs(history: Sequence[Run], unchanged: UnchangedParts) -> list[dict[str, Any]]:
    """Return the runs, newest first."""
    before, ended, runs = unchanged.ended, {}, []
    for run in reversed(history):
        part = before.get(run)
        if part is None:
            done = run.done()
            part = _run(run, done=done)
        else:
            done = True
        if done:
            ended[run] = part
        runs.append(part)
    unchanged.ended = ended
    return runs


def _run(run: Run, *, done: bool) -> dict[str, Any]:
    record, status = run.record, RunStatus.of(run)
    return {
        **m.fields_of(status),
        "cell": run.cell_id,
        "group": run.group,
        "place": run.place,
        "numbers": list(record.ranks),
        "began_at_s": run.clock.began_at_s,
        "elapsed_s": status.elapsed_s if done else None,
        "stop_asked_at_s": run.stop_order.asked_at_s,
        "stopping": run.stopping if run.interrupted else "",
        "trouble": _trouble(record) if status.state != "done" else "",
        "not_finite": phrases_on_not_finite(record, only_now=True),
        "progress": _slowest(record),
        "line": _last_line(record),
        # An ended run is shown in one line; of a running one people watch the ranks.
        "members": [] if done else [_member(rank) for rank in record.ranks.values()],
    }


def _member(rank: RankRecord) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "state": rank.state,
        "device": rank.device_name or rank.device,
        "rss_bytes": rank.rss_bytes,
        **m.fields_of(RankUsage.of(rank)),
    }


def _slowest(record: RunRecord) -> dict[str, Any] | None:
    """Return the outermost loop of the rank that has made the least progress, and the seconds until the last rank ends;
    None for these if nothing moves."""
    loops = [rank for rank in record.ranks.values() if rank.progress]
    if not loops:
        return None
    bar = min((rank.progress[0] for rank in loops), key=lambda each: each.step)
    left = [left for rank in loops if not rank.finished and (left := seconds_left(rank.progress)) is not None]
    left_s = max(left) if left and record.stall is None else None
    return {"label": bar.label, "step": bar.step, "total": bar.total, "left_s": left_s}


def _trouble(record: RunRecord) -> str:
    """Return the first failure as one line; empty if there is none."""
    cause = failures.cause(record)
    return "" if cause is None else failures.first_trouble(record, cause, LINE_CHARACTERS)


def _last_line(record: RunRecord) -> str:
    for rank in record.ranks.values():
        if rank.last_line:
            return clipped(rank.last_line, LINE_CHARACTERS)
    return ""


def saved_runs(words: str) -> dict[str, Any]:
    """Return the newest saved runs that contain all of these words, and the number of others."""
    found = matching(run_files.load(), words.split())
    return {"saved": found.as_dicts(), "more": max(0, len(found) - SHOWN)}


def table_of_saved_runs(words: str) -> dict[str, Any]:
    """Return more of them than `saved_runs`, with what they can be sorted by."""
    found = matching(run_files.load(), words.split())
    return {"table": found.as_table(_ROWS), "more": max(0, len(found) - _ROWS)}
