"""Holds the process of one rank: signals to it, and its end. Runs in the agent's loop."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

from jupyter_distrib.system import reap


class RankProcess:
    """A process that is being started, or lives, or has ended.

    Args:
        mark: The mark in the environment of what it starts.
        sweep: Kills what it leaves.
    """

    def __init__(self, mark: str, sweep: reap.Sweep) -> None:
        self.mark = mark
        self.pid = 0
        """Process id; 0 until the process is started."""
        self.expected = False
        """Whether the process is being started, so that it may exist already."""
        self.reaped = False
        """Whether the system has forgotten the pid, so that it must not be signalled any more."""
        self.ended = False
        self.killed = False
        """Whether we killed it in the middle of a run; the system has yet to report its end."""
        self._sweep = sweep

    @property
    def living(self) -> bool:
        """Return whether there is a process: a killed one has its GPU and its memory until the system reports its
        end."""
        return self.expected or (bool(self.pid) and not self.reaped)

    def signal(self, number: int, *, whole_group: bool = False) -> None:
        """Send a signal to the process, or to the process group that it leads."""
        if self.pid and not self.reaped:
            with suppress(ProcessLookupError):
                os.kill(-self.pid if whole_group else self.pid, number)

    def kill(self) -> None:
        """Kill the process; its end is reported separately."""
        self.killed = True
        self.signal(signal.SIGKILL)

    def end(self) -> None:
        """Kill the process, and a moment later everything that it started. Once."""
        if self.pid and not self.ended:
            self.ended = True
            self.signal(signal.SIGKILL)
            self._sweep.add(self.pid, self.mark)
