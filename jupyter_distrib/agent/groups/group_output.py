"""Assigns the output of a worker group's ranks to the right run. Runs in the agent's loop."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from jupyter_distrib.agent.groups.rank_table import RankTable
from jupyter_distrib.agent.ranks.leftovers import BackgroundJobs
from jupyter_distrib.agent.ranks.output import RunOutput, write_late
from jupyter_distrib.agent.ranks.rank import Rank
from jupyter_distrib.server.worker_group import Emit
from jupyter_distrib.system.event_loop import Loop
from jupyter_distrib.wire import messages as m

STRAY = (
    "C code or a thread of an earlier cell is still writing to this rank's standard output, bypassing Python's "
    "streams: its further output cannot be told apart from the output of this cell"
)


class GroupOutput:
    """The output of one worker group.

    Args:
        logs: Folder of the logs of all runs.
    """

    def __init__(self, loop: Loop, logs: Path) -> None:
        self._loop, self._logs = loop, logs
        self._latest: RunOutput | None = None
        self._background_jobs = BackgroundJobs()

    def start_run(self, run: str, emit: Emit) -> RunOutput:
        """Return the output of a new run, and close that of the last one."""
        self.close()
        self._latest = RunOutput(run, self._logs / run, self._loop, lambda event: emit(event, ()))
        return self._latest

    def send_stray_notes(self, run: str, ranks: Iterable[Rank], emit: Emit) -> None:
        """Add a note to a new run for each rank on which code of an earlier cell still writes to standard output or
        error."""
        for rank in ranks:
            if rank.streams.pop_stray():
                emit(m.Noted(run=run, rank=rank.number, text=STRAY), ())

    def write_to_log(self, rank: int, stream: str, data: bytes) -> None:
        """Log the output of a rank that executes no cell: it belongs to the last run."""
        if self._latest is not None:
            self._latest.write(rank, stream, data, show=False)

    def write_late(self, rank: int, event: m.Wrote) -> None:
        """Log the output of a thread or process of an earlier run."""
        write_late(self._logs, rank, event)

    def replace_shared_streams(self, ranks: RankTable, run: str) -> None:
        """Give idle ranks new pipes if a process left behind by the run may still hold the old ones."""
        self._background_jobs.replace_streams(ranks, ranks.pids, run)

    def close(self) -> None:
        if self._latest is not None:
            self._latest.close()
            self._latest = None
