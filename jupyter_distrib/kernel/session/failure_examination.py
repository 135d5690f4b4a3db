"""The debugging of a cell that has failed, in a rank that keeps the frames of its exception. Kernel's main thread."""

from __future__ import annotations

import time

from jupyter_distrib.errors import PoolError
from jupyter_distrib.kernel.analysis import failures
from jupyter_distrib.kernel.session.pools.connection import GroupState, WorkerGroup
from jupyter_distrib.kernel.session.pools.pool_manager import PoolManager
from jupyter_distrib.kernel.session.runs import prompts
from jupyter_distrib.kernel.session.runs.debug_prompt import POLL_S, Conversation
from jupyter_distrib.kernel.session.runs.run import Run
from jupyter_distrib.kernel.session.runs.run_history import RunHistory
from jupyter_distrib.system.formatting import rank_list

ANSWER_S = 10.0
"""Seconds within which an idle rank must open its debugger."""
HELP = "w: where, u and d: up and down the frames, p NAME: a value, q: leave, h: all commands"
NO_PROMPT = "the debugger cannot ask you anything: {}. Run the cell in JupyterLab, Jupyter console or VS Code."


def examine(runs: RunHistory, pools: PoolManager, number: int | None) -> None:
    """Debug the last run, which has failed, in a rank that has kept its failure; None for the rank that failed first.

    Raises:
        PoolError: There is nothing to debug, or nobody can be asked.
    """
    run, group = _failed(runs, pools)
    rank = _rank_of(run, number)
    if reason := prompts.missing():
        raise PoolError(NO_PROMPT.format(reason))
    with group.connection.routing_to(run):
        print(f"rank {rank}: {failures.in_brief(run.record, run.record.ranks[rank])}")
        try:
            if not _opened(run, rank):
                raise PoolError(_reason(run, rank))
            conversation = Conversation(run, HELP, is_over=lambda: group.state is not GroupState.OPEN)
            while run.record.ranks[rank].prompt is not None and group.state is GroupState.OPEN:
                conversation.answer(rank)
        finally:
            if run.record.ranks[rank].prompt is not None:
                run.link.debug(rank, "end", "")


def offer(runs: RunHistory, pools: PoolManager) -> None:
    """Debug the last run, as `examine` does, or print why that cannot be done."""
    try:
        examine(runs, pools, None)
    except PoolError as refusal:
        print(f"--debug: {refusal}")


def drop(runs: RunHistory, pools: PoolManager) -> None:
    """Make the ranks of the last run drop what they kept of its failure. Raises `PoolError`."""
    run, _ = _failed(runs, pools)
    for rank in run.record.ranks:
        run.link.debug(rank, "drop", "")


def _failed(runs: RunHistory, pools: PoolManager) -> tuple[Run, WorkerGroup]:
    """Return the last run, which must have failed, and its group, which must not have executed anything since. Raises
    `PoolError`."""
    run = runs.find(None)
    if not run.done():
        raise PoolError(f"run {run.id} goes on: %distributed_stack shows where its ranks are.")
    if all(rank.failure is None for rank in run.record.ranks.values()):
        raise PoolError(f"no rank of the last run ({run.id}) has raised an exception.")
    if run.link.echoes_output:
        raise PoolError("ranks of the inline pool keep no failure: write breakpoint() into the cell, or use %debug.")
    group = next((group for group in pools.groups() if group.run is run and group.state is GroupState.OPEN), None)
    if group is None:
        raise PoolError(f"the ranks of run {run.id} have ended or executed something else since, so nothing is kept.")
    return run, group


def _rank_of(run: Run, number: int | None) -> int:
    """Return the rank to debug. Raises `PoolError` for a rank that has kept nothing."""
    keeping = [rank for rank, state in run.record.ranks.items() if state.failure is not None and state.exit is None]
    cause = failures.cause(run.record)
    if number is None:
        number = cause if cause in keeping else next(iter(keeping), None)
    if number in keeping:
        return number
    kept = f"only {rank_list(keeping)} of run {run.id} can be debugged: " if keeping else ""
    who = "the ranks that failed" if number is None else f"rank {number}"
    raise PoolError(
        f"{who} cannot be debugged: {kept}a rank keeps its memory if it has raised an exception and is still alive."
    )


def _reason(run: Run, rank: int) -> str:
    left = run.record.ranks[rank].left_debugger
    return left.text if left is not None else f"rank {rank} does not open its debugger."


def _opened(run: Run, rank: int) -> bool:
    """Open the debugger of an idle rank. Return False if there is nothing to debug."""
    before = run.record.changes
    run.link.debug(rank, "examine", "")
    deadline_s = time.monotonic() + ANSWER_S
    while run.record.changes == before:
        if time.monotonic() > deadline_s:
            raise PoolError(f"rank {rank} has not answered within {ANSWER_S:.0f} s.")
        time.sleep(POLL_S)
    return run.record.ranks[rank].prompt is not None
