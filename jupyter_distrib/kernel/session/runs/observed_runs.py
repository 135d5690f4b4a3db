"""The facts about a run that its observers get, and the end of one whose cell was never sent.

In the thread that runs the cell."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from jupyter_distrib.kernel.record.observer import ObservedRun
from jupyter_distrib.kernel.session.runs.run import Run
from jupyter_distrib.kernel.settings.cell_options import Options
from jupyter_distrib.wire import messages as m


def facts(
    run: Run,
    cell: m.Cell | None = None,
    options: Options | None = None,
    *,
    track: tuple[str, ...] = (),
    context: Mapping[str, object] | None = None,
) -> ObservedRun:
    """Return the facts about a run for its observers; a run without its cell is an attached one, and `track` then are
    the trackers that it writes to."""
    record = run.record
    return ObservedRun(
        id=record.run,
        label=record.label,
        source=cell.source if cell is not None else "",
        options=({"track": track} if track else {}) if options is None else options.given(),
        strategy=record.strategy,
        pool=run.link.pool,
        ranks=tuple(record.ranks),
        world_size=record.world_size,
        gpus=record.gpus,
        detached=run.detached,
        attached=cell is None,
        began_at_s=run.clock.began_at_s,
        note=run.note,
        context=context or {},
    )


@contextmanager
def told_of_a_failed_start(run: Run) -> Iterator[None]:
    """Pass the end of the run to its observers if any exception keeps the cell from being sent."""
    try:
        yield
    except BaseException:
        if not run.done():
            run.observers.tell(m.Ended(run=run.id, at_s=time.monotonic()), run.record)
        raise
