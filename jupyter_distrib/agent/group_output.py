"""Assigns what the ranks of one worker group write to the run that it belongs to. Runs in the agent's loop."""

from __future__ import annotations

from pathlib import Path

from jupyter_distrib.agent.output import RunOutput, write_late
from jupyter_distrib.server.pending_cell import Tell
from jupyter_distrib.system.event_loop import Loop
from jupyter_distrib.wire.messages import Wrote


class GroupOutput:
    """The output of one worker group.

    Args:
        logs: Folder of the logs of all runs.
    """

    def __init__(self, loop: Loop, logs: Path) -> None:
        self._loop, self._logs = loop, logs
        self._latest: RunOutput | None = None

    def begin(self, run: str, tell: Tell) -> RunOutput:
        """Return the output of a new run, and close that of the last one."""
        self.close()
        self._latest = RunOutput(run, self._logs / run, self._loop, lambda event: tell(event, ()))
        return self._latest

    def write_to_log(self, rank: int, stream: str, data: bytes) -> None:
        """Log the output of a rank that executes no cell: it belongs to the last run."""
        if self._latest is not None:
            self._latest.write(rank, stream, data, show=False)

    def write_late(self, rank: int, event: Wrote) -> None:
        """Log the output of a thread or process of an earlier run."""
        write_late(self._logs, rank, event)

    def close(self) -> None:
        if self._latest is not None:
            self._latest.close()
            self._latest = None
