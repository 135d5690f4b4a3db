"""The selection of ranks for a cell among existing ones. In the thread that runs the cell."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from jupyter_distrib.errors import CaptureError, PoolError
from jupyter_distrib.kernel.session.pools.connection import Connection, GroupRequest, GroupState, WorkerGroup
from jupyter_distrib.kernel.session.pools.gpu_variables import not_in_force
from jupyter_distrib.kernel.session.runs.results import RankValue
from jupyter_distrib.kernel.settings.cell_options import GroupSize
from jupyter_distrib.kernel.settings.settings import CellOptions
from jupyter_distrib.system import process_environment
from jupyter_distrib.system.formatting import rank_list
from jupyter_distrib.wire import messages as m


def requested(options: CellOptions, connection: Connection, packages: m.Packages | None) -> GroupRequest:
    """Return the cell's request. It is for CPU ranks if the pool has no GPUs and cannot get any, unless the pool is to
    refuse the request for GPUs and say why."""
    size = options.size
    # Nodes with GPUs may join a cluster.
    may_come = size.count is not None and connection.facts.remote
    may_come = may_come and (bool(options.filled.wait_s) or not connection.groups)
    refuses = bool(size.gpu_type) or (size.count is not None and connection.gpus.broken)
    if size.gpus and connection.gpus.exist is False and not may_come and not refuses:
        size = size.on_cpus()
    has_gpus = size.gpus and connection.gpus.exist is not False and not connection.facts.remote
    changed = connection.gpu_variables.changed() if has_gpus else {}
    env = options.filled.env
    load_env = {**changed, **(process_environment.load_time_changes(env) if env else {})}
    return GroupRequest(
        size=size,
        load_env=load_env,
        changed=changed,
        packages=packages,
        visible=connection.gpus.devices,
    )


def fitting(groups: Iterable[WorkerGroup], request: GroupRequest) -> tuple[list[WorkerGroup], list[WorkerGroup]]:
    """Return the groups whose ranks meet the request and have the packages as they are now: idle ones and busy ones."""
    idle, busy = list[WorkerGroup](), list[WorkerGroup]()
    for group in groups:
        if _meets(group, request) and not group.packages.changes:
            (busy if group.busy else idle).append(group)
    return idle, busy


def fits_if_kept(group: WorkerGroup, request: GroupRequest) -> bool:
    """Return whether these ranks meet the request except for packages that have changed, and variables that the
    notebook has set, since they started."""
    asked = group.asked
    return _given(asked) == _given(request) and _meets(group, replace(request, load_env=asked.load_env))


def _meets(group: WorkerGroup, request: GroupRequest) -> bool:
    """Return whether these ranks meet the request; its size is for CPU ranks if the pool has no GPUs."""
    size, asked = request.size, group.asked
    on_cpus = group.state is GroupState.OPEN and not group.gpus  # where nothing reads the variables of GPU libraries
    same = _given(asked) == _given(request) if on_cpus else asked.load_env == request.load_env
    if group.state is GroupState.CLOSED or not same or asked.packages != request.packages:
        return False
    if asked.size.gpus and asked.visible != request.visible:
        return False
    if size.gpu_type and size.gpu_type.lower() != asked.size.gpu_type.lower():
        return False
    if group.state is GroupState.OPENING:
        return replace(asked.size, gpu_type="") == replace(size, gpu_type="")
    return group.gpus == size.gpus and size.count in (None, len(group.workers))


def _given(request: GroupRequest) -> dict[str, str]:
    """Return the variables that were requested by `--env`."""
    return {name: value for name, value in request.load_env.items() if request.changed.get(name) != value}


def with_notes_on_changes(group: WorkerGroup, request: GroupRequest) -> WorkerGroup:
    """Return the group, which keeps values; add notes for the head of its next run, once, on variables of the notebook
    that are not in force and packages that have changed."""
    for text in (not_in_force(request.changed, group.asked.load_env), _changed_since(group)):
        if text and text not in group.announced:
            group.announced.add(text)
            group.notes = (*group.notes, text)
    return group


def _changed_since(group: WorkerGroup) -> str:
    """Return a sentence on packages that have changed since the ranks started; empty if none have."""
    if not (changes := group.packages.changes):
        return ""
    return (
        f"packages have changed since these ranks were started: {changes}; what the ranks had imported by then stays, "
        "since they keep values; --fresh starts new ranks"
    )


def wait_or_refuse(group: WorkerGroup, until_s: float, turns: threading.Condition) -> None:
    """Wait until another cell of this notebook may have released these ranks; raise `PoolError` at the deadline.

    Args:
        group: The ranks, which are `busy`.
        until_s: The time to give up, by `time.monotonic`.
        turns: The condition that is notified when a thread has sent its cell or has failed to; not held.
    """
    left_s = until_s - time.monotonic()
    if left_s <= 0 or group.state is GroupState.CLOSED:
        raise busy(group)
    if (run := group.executing) is not None:
        run.wait_ended(left_s)
    else:
        with turns:
            turns.wait_for(lambda: not group.claimed, left_s)


def of_handles(
    handles: Sequence[RankValue], connection: Connection, size: GroupSize, on: Iterable[int] | None
) -> WorkerGroup:
    """Return the worker group that keeps the values read by the cell."""
    first = handles[0]
    for handle in handles:
        if lost := handle.lost.intersection(handle.ranks if on is None else on):
            handle[min(lost)]  # raises the error that says so
        if handle.group != first.group:
            raise CaptureError(
                f"`{first.name}` and `{handle.name}` were kept on different ranks; one cell cannot read both."
            )
    group = connection.groups.get(first.group)
    if group is None:
        raise CaptureError(
            f"`{first.name}` is not kept on the {connection.facts.pool} pool: leave out --pool, or name its own."
        )
    if not (size.count is None or (size.fewest or 0) <= group.size <= size.count):
        raise CaptureError(
            f"`{first.name}` is kept on {group.size} ranks: run this cell with --ranks {group.size}, "
            "or --on some of them."
        )
    for handle in handles:
        if set(range(group.size)).intersection(range(group.size) if on is None else on) - set(handle.ranks):
            ranks = rank_list(handle.ranks)
            numbers = ranks.partition(" ")[2].replace(" ", "")
            raise CaptureError(f"`{handle.name}` was kept on {ranks} only: run this cell with --on {numbers}.")
    return group


def newest(connection: Connection) -> WorkerGroup:
    groups = list(connection.groups.values())
    if not groups:
        raise PoolError("--on needs ranks that are up, and there are none: run a cell without --on first.")
    return next((group for group in reversed(groups) if not group.busy), groups[-1])


def busy(group: WorkerGroup) -> PoolError:
    """Return an error on why a cell cannot use these ranks, which another cell uses."""
    if (run := group.executing) is None:
        return PoolError("another cell is about to run on these ranks: wait for it, or use --wait S.")
    look = f"see it with `%distributed_attach {run.id}`" if run.detached else "see it with `%distributed_status`"
    return PoolError(
        f"{run.record.label} is still running on these ranks (run {run.id}): wait for it with --wait S, {look}, "
        f"or stop it with `%distributed_pool stop`."
    )
