"""The answers of line magics that act on the session or read from it. Loaded with the first of them, in the kernel's
main thread; all raise `DistributedError`.

    change_pools     %distributed_pool     shows the pools or changes one
    run_named                              finds the run that a line names
    print_logs       %distributed_logs     prints the output of a run
    find_runs        %distributed_runs     lists, searches and compares saved runs
    sample_stacks    %distributed_flame    samples the stacks of a run in progress
    compare_ranks    %distributed_diff     compares a kept value between ranks
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from jupyter_distrib.errors import OptionsError, PoolError
from jupyter_distrib.kernel.history import run_files
from jupyter_distrib.kernel.history.listing import Comparison, RunList, matching
from jupyter_distrib.kernel.notebook import magic_requests
from jupyter_distrib.kernel.notebook.magic_requests import PoolRequest
from jupyter_distrib.kernel.notebook.status import PoolTable
from jupyter_distrib.kernel.notebook.sweep import SweepRuns
from jupyter_distrib.kernel.record.terminal_stream import for_terminal
from jupyter_distrib.kernel.session import machines, rank_differences, saved_runs, session
from jupyter_distrib.kernel.session.pools.connection import GroupState
from jupyter_distrib.kernel.session.pools.waiting_line import WaitingLine
from jupyter_distrib.kernel.session.rank_differences import Differences
from jupyter_distrib.kernel.session.runs import json_lines
from jupyter_distrib.kernel.session.runs.results import RankValue, Results
from jupyter_distrib.kernel.session.runs.run import Run
from jupyter_distrib.kernel.session.session import Session
from jupyter_distrib.kernel.settings import pool_definitions
from jupyter_distrib.kernel.views.flame import FlameGraph
from jupyter_distrib.options import any_of, shown, split_words
from jupyter_distrib.system.formatting import rank_list
from jupyter_distrib.wire import messages as m

FLAME_S = 5.0
_WITHOUT_FILES = ("list", "stop", "down")
"""The actions of `%distributed_pool` that work while the settings files cannot be read."""


def change_pools(line: str) -> PoolTable:
    """Execute a line of `%distributed_pool`, and return the pools as they are afterwards."""
    current = session.current()
    settings, trouble = current.choices.readable_settings()
    of_kinds = pool_definitions.of_kinds(settings.kinds, settings.strategies)
    if trouble and (split_words(line) or _WITHOUT_FILES)[0] not in _WITHOUT_FILES:
        settings = current.settings  # raises the reason
    elif trouble:
        print(trouble)
    request = magic_requests.parse_pool(line, pools=tuple(settings.pools), of_kinds=of_kinds)
    for text in current.choices.unannounced(settings) if request.action != "trust" else ():
        print(text)
    name = request.name or settings.pool
    with _saying_what_ends(current, name):
        _change(current, request, name)
    return PoolTable.of(current)


@contextmanager
def _saying_what_ends(current: Session, pool: str) -> Iterator[None]:
    """Print which runs the block ends with their ranks."""
    pools = current.pools
    running = [(group, run) for group in pools.groups(pool) if (run := group.executing) is not None]
    starting = [start for start in pools.starts if start.pool == pool and start.run]
    opening = [group for group in pools.groups(pool) if group.state is GroupState.OPENING]
    try:
        yield
    finally:
        left = pools.groups(pool)
        ended = [(run.id, run.record.label) for group, run in running if group not in left]
        if opening and not set(opening).intersection(left):
            ended += [(start.run, start.label) for start in starting]
        for run_id, label in ended:
            print(f"Run {run_id} of {label} was ended with its ranks.")


def _change(current: Session, request: PoolRequest, name: str) -> None:
    pools = current.pools
    match request.action:
        case "list":
            pass
        case "use":
            current.choices.use(request.name)
            current.changed()
        case "add":
            pools.add_pool(pool_definitions.add(current.settings, name, request.kind or "", request.values))
        case "remove":
            pools.remove_pool(name)
        case "start":
            pools.start_ranks(name, request.size)
        case "stop":
            pools.stop_ranks(name)
        case "restart":
            pools.restart_ranks(name)
        case "resize":
            pools.resize(name, request.size or request.count)
        case "up":
            _say_while(lambda say: machines.start(current, name, say))
        case "down":
            _say_while(lambda say: machines.end(current, name, say))
        case "trust":
            print(current.choices.trust(request.name))


def _say_while(act: Callable[[Callable[[str], None]], None]) -> None:
    """Do something, and show under the cell what it waits for."""
    line = WaitingLine()
    try:
        act(line.say)
    finally:
        line.end()


def find_runs(line: str) -> RunList | Comparison:
    """Return the runs requested by a line: `lr ddp`, `12`, `diff 12 15`. Raises `DistributedError`."""
    current = session.current()
    current.history_writer.flush()
    saved_runs.save_lost(current.choices.readable_settings()[0])
    words = split_words(line)
    first, names = "".join(words[:1]), words[1:]
    if first == "diff":
        if len(names) < 2:
            raise OptionsError("%distributed_runs diff needs two or more runs: %distributed_runs diff 12 15")
        return Comparison(tuple(run_files.find(name) for name in names))
    if first.isdecimal() and not names:
        return Comparison((run_files.find(first),))
    saved = run_files.load_with_note()
    return matching(saved.runs, words, saved.note)


def run_named(name: str | None, notebook: Mapping[str, object]) -> Run:
    """Return the run with this id or number, or that a name of the notebook holds, itself or its values; for None the
    last one. Raises `PoolError`."""
    value = notebook.get(name) if name else None
    if isinstance(value, Run):
        return value
    if isinstance(value, SweepRuns):
        of_sweep = ", ".join(each.id for each in value.runs)
        raise PoolError(f"`{name}` holds the runs of a sweep: give the number of one of them: {of_sweep}.")
    if isinstance(value, Results):
        if not value.run:
            raise PoolError(f"`{name}` does not say which run made it: give the number of the run instead.")
        name = value.run
    return session.current().find_run(name)


def print_logs(line: str, notebook: Mapping[str, object]) -> None:
    """Print the output of a run or, if there is none, why. Raises `DistributedError`."""
    request = magic_requests.parse_logs(line)
    run = run_named(request.run, notebook)
    if request.json:
        print(json_lines.logs_line(run, request.rank))
        return
    print(for_terminal(text := run.logs(request.rank), sys.stdout), end="")
    ranks = [rank for rank in run.record.ranks if request.rank in (None, rank)]
    wrote = [rank for rank in ranks if run.done() and run.record.ranks[rank].last_line]
    if lost := [rank for rank in wrote if not (file := run.log_file(rank)).exists() or not file.stat().st_size]:
        file = run.log_file(lost[0])
        print(f"{rank_list(lost, sentence=True)} of run {run.id} printed more, but the log is empty or gone: {file}")
    elif not text:
        who = f"Run {run.id}" if request.rank is None else f"Rank {request.rank} of run {run.id}"
        print(f"{who} has printed nothing{'.' if run.done() else ' so far.'}")


def sample_stacks(line: str) -> FlameGraph:
    """Return the flame graph of one rank, or of all, of the last run in progress. Raises `DistributedError`."""
    words = split_words(line)
    if len(words) > 1 or not all(word.isdecimal() for word in words):
        raise OptionsError(
            f"%distributed_flame takes the number of a rank, or nothing for all ranks; got {line.strip()}"
        )
    run = next((run for run in reversed(session.current().history) if run.state == "running"), None)
    if run is None:
        raise PoolError("no run is in progress: start one with --detach, then sample it.")
    ranks = {int(word) for word in words} or set(run.record.ranks)
    if missing := ranks - run.record.ranks.keys():
        raise PoolError(f"run {run.id} has no rank {min(missing)}: it is on {rank_list(run.record.ranks)}.")
    return _sampled(run, ranks)


def _sampled(run: Run, ranks: set[int]) -> FlameGraph:
    stacks: list[tuple[int, tuple[m.Frame, ...]]] = []
    began_s = time.monotonic()
    while (elapsed_s := time.monotonic() - began_s) < FLAME_S and not run.done():
        stacks += [(rank, seen.frames) for rank, seen in run.stacks().items() if rank in ranks]
    graph = FlameGraph.of(stacks, elapsed_s)
    if not graph.samples:
        raise PoolError(f"no rank of run {run.id} has answered; perhaps they have not started the cell yet.")
    return graph


def compare_ranks(line: str, notebook: Mapping[str, object]) -> Differences:
    """Return how the value of a name differs between the ranks that keep it. Raises `DistributedError`."""
    name = magic_requests.parse_diff(line)
    value = notebook.get(name)
    if not isinstance(value, RankValue):
        kept = sorted(each for each, held in notebook.items() if each[:1] != "_" and isinstance(held, RankValue))
        there = f"choose {any_of(kept)}" if kept else "no rank keeps a value: use --keep NAME"
        if not name:
            raise OptionsError(
                f"%distributed_diff needs the name of a value that --keep has kept on the ranks; {there}"
            )
        why = "is not a value that --keep has kept on the ranks" if name in notebook else "is no name of this notebook"
        raise OptionsError(f"%distributed_diff: {shown(name)} {why}; {there}")
    return rank_differences.compare(session.current(), value)
