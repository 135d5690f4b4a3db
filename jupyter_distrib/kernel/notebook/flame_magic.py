"""The line magic `%distributed_flame`, which samples the stacks of a run that goes on. Kernel's main thread."""

from __future__ import annotations

import time

from jupyter_distrib.errors import OptionsError, PoolError
from jupyter_distrib.kernel.session import session
from jupyter_distrib.kernel.session.runs.run import Run
from jupyter_distrib.kernel.views.flame import FlameGraph
from jupyter_distrib.options import split_words
from jupyter_distrib.wire import messages as m

SECONDS = 5.0


def answer(line: str) -> FlameGraph:
    """Return the flame graph of one rank, or of all, of the last run that goes on. Raises `DistributedError`."""
    words = split_words(line)
    if len(words) > 1 or not all(word.isdecimal() for word in words):
        raise OptionsError(
            f"%distributed_flame takes the number of a rank, or nothing for all ranks; got {line.strip()}"
        )
    run = next((run for run in reversed(session.current().history) if run.state == "running"), None)
    if run is None:
        raise PoolError("no run goes on: start one with --detach, and sample it meanwhile.")
    ranks = {int(word) for word in words} or set(run.record.ranks)
    if missing := ranks - run.record.ranks.keys():
        raise PoolError(f"run {run.id} has no rank {min(missing)}.")
    return _sampled(run, ranks)


def _sampled(run: Run, ranks: set[int]) -> FlameGraph:
    stacks: list[tuple[int, tuple[m.Frame, ...]]] = []
    began_s = time.monotonic()
    while (elapsed_s := time.monotonic() - began_s) < SECONDS and not run.done():
        stacks += [(rank, seen.frames) for rank, seen in run.stacks().items() if rank in ranks]
    graph = FlameGraph.of(stacks, elapsed_s)
    if not graph.samples:
        raise PoolError(f"no rank of run {run.id} has answered; its ranks have not started the cell, perhaps.")
    return graph
