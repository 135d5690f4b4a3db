"""Makes the final events of a run for ranks that cannot report their own end. Any process; pure but for the clock."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from jupyter_distrib.wire import messages as m


def interrupted(run: str, ranks: Sequence[int]) -> list[m.RunEvent]:
    """End a run that was stopped before it reached its ranks."""
    now_s = time.monotonic()
    return [*(m.Interrupted(run=run, rank=rank, frames=(), at_s=now_s) for rank in ranks), m.Ended(run=run, at_s=now_s)]


def failed(run: str, ranks: Sequence[int], failure: m.Failure) -> list[m.RunEvent]:
    """End a run that did not reach its ranks, which stay for the next one."""
    now_s = time.monotonic()
    return [
        *(m.Failed(run=run, rank=rank, failure=failure, at_s=now_s) for rank in ranks),
        m.Ended(run=run, at_s=now_s),
    ]


def lost(run: str, pids: Mapping[int, int], reason: str = "", *, log_directory: str = "") -> list[m.RunEvent]:
    """End a run whose ranks are gone or out of reach; `pids` has the process of each rank (0: unknown)."""
    ended = m.Ended(run=run, at_s=time.monotonic(), log_directory=log_directory)
    return [*exits(run, pids, lost=reason, asked=False), ended]


def exits(
    run: str, pids: Mapping[int, int], *, asked: bool, exit_code: int | None = None, lost: str = "", reason: str = ""
) -> list[m.Exited]:
    """Report that ranks' processes have ended, or count as ended.

    Args:
        run: The id of the run.
        pids: The process of each rank; 0 if unknown.
        asked: Whether they were killed, for the `reason` or because another rank had failed.
        exit_code: As in `Exited`.
        lost: Reason why they are out of reach; empty if they are not.
        reason: As in `Exited`.
    """
    return [
        m.Exited(
            run=run,
            rank=rank,
            pid=pid,
            exit_code=exit_code,
            asked=asked,
            reason=reason or lost,
            at_s=time.monotonic(),
        )
        for rank, pid in pids.items()
    ]
