"""Makes the runs of this kernel: one that waits in the queue, one on the ranks that it has got, and one for a detached
run that goes on somewhere. In the thread that runs the cell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import filterfalse

from jupyter_distrib.errors import PoolError
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.kernel.session.cell_order import Order
from jupyter_distrib.kernel.session.pools.connection import Connection, WorkerGroup
from jupyter_distrib.kernel.session.runs.run import PoolLink, Run
from jupyter_distrib.system.formatting import rank_list
from jupyter_distrib.wire import messages as m


def queued(order: Order, run_id: str) -> Run:
    """Return a run that has no ranks yet."""
    request, options = order.request, order.options.filled
    count = order.options.size.count or 0
    ranks = tuple(sorted(options.on)) if options.on is not None else tuple(range(count))
    record = RunRecord(
        run=run_id, label=request.label, ranks=ranks, world_size=count, strategy=options.strategy or "none"
    )
    lines = _lines(request.cell)
    run = Run(
        record,
        PoolLink(pool=options.pool or ""),
        cell=lines,
        detached=options.detach,
        awaited=False,
        cell_id=request.cell_id,
        in_words=request.in_words,
    )
    run.move_on("queued", "queued")
    return run


def _lines(cell: m.Cell) -> dict[str, list[str]]:
    return {cell.filename: (cell.shown or cell.source).splitlines(keepends=True)}


def on_group(group: WorkerGroup, order: Order, queued: Run | None, *, run_id: str) -> Run:
    """Return the run of a cell on this worker group: the queued run, which begins now, or a new one.

    Raises:
        PoolError: `--on` names ranks that the group does not have.
    """
    request, options, size = order.request, order.options.filled, len(group.workers)
    ranks = tuple(sorted(options.on)) if options.on is not None else tuple(range(size))
    if missing := set(ranks) - set(range(size)):
        raise PoolError(f"--on names {rank_list(missing)}, but there are {rank_list(range(size))} only.")
    stay = [*filterfalse(group.announced.__contains__, order.process_state.libraries.stay)]
    group.announced.update(stay)
    link = replace(_link(group.connection, run_id), debug=_debug(group, run_id))
    cell, in_words = _lines(request.cell), request.in_words
    record = RunRecord(
        run=run_id,
        label=request.label,
        ranks=ranks,
        world_size=size,
        gpus=group.gpus,
        strategy=options.strategy or "none",
        workers=group.workers,
        remark="; ".join(filter(None, (order.options.origins, group.connection.versions.remark))),
    )
    if options.gpus is not None and not group.gpus:
        text = f"no GPU here: {size} CPU rank{'s' * (size > 1)} (gloo)"
        record.apply(m.Noted(run=record.run, rank=None, text=text))
    for text in (*request.notes, *stay, *group.notes):
        record.apply(m.Noted(run=record.run, rank=None, text=text))
    group.notes = ()
    if queued is not None:
        queued.begin(record, link)
        return queued
    return Run(
        record,
        link,
        cell=cell,
        detached=options.detach,
        cell_id=request.cell_id,
        in_words=in_words,
    )


def attached(event: m.Attached, connection: Connection, remark: str = "") -> Run:
    """Return a run for a detached one that began earlier, maybe in another kernel; its events follow."""
    record = RunRecord(
        run=event.run,
        label=event.label,
        ranks=event.ranks,
        world_size=event.world_size,
        gpus=event.gpus,
        strategy=event.strategy,
        workers=event.workers,
        remark=remark,
    )
    return Run(record, _link(connection, event.run), age_s=event.elapsed_s, detached=True)


def _link(connection: Connection, run: str) -> PoolLink:
    node = connection.node
    return PoolLink(
        pool=connection.facts.pool,
        stop=lambda force: node.send(m.Stop(run=run, force=force)),
        ask_stacks=lambda: node.send(m.AskStacks(run=run)),
        abandon=connection.abandon,
        echoes_output=connection.facts.capabilities.echoes_output,
    )


def _debug(group: WorkerGroup, run: str) -> Callable[[int, str, str], object]:
    node = group.connection.node
    return lambda rank, action, line: node.send(m.Debug(run=run, group=group.name, rank=rank, action=action, line=line))
