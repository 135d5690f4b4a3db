"""Reads what a rank notes for its agent in memory that both share (`system/crash_notes.py`). Runs in the agent's
loop."""

from __future__ import annotations

import os

from jupyter_distrib.agent.ranks import usage
from jupyter_distrib.agent.ranks.rank_process import RankProcess
from jupyter_distrib.system import crash_notes


class RankNotes:
    """The notes of one rank."""

    def __init__(self) -> None:
        self._fd = crash_notes.create()
        self.loading = ""
        """Variable that the rank was loading when it ended; set once these notes are closed."""

    def descriptor(self) -> int:
        """Duplicate the descriptor for the rank's process."""
        return os.dup(self._fd)

    def ask_place(self, process: RankProcess) -> None:
        """Have a rank write where its main thread is, even if it answers nobody; `place` returns it a moment later.

        A process that does not handle the signal, because user code has put another program in its place, would die.
        """
        number = crash_notes.PLACE_SIGNAL
        if number is not None and self._fd >= 0 and usage.catches(process.pid, number):
            crash_notes.clear_place(self._fd)
            process.signal(number)

    @property
    def place(self) -> str:
        return crash_notes.place(self._fd) if self._fd >= 0 else ""

    def close(self) -> None:
        if self._fd >= 0:
            self.loading = crash_notes.read(self._fd)
            os.close(self._fd)
            self._fd = -1
