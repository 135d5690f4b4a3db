"""Repairs what a cell has damaged in its own process and every later cell needs. What cannot be repaired ends the rank,
with the reason in the notes that the agent reads. Rank's main thread, right after the cell's own code.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import NoReturn

from jupyter_distrib.system import process
from jupyter_distrib.system.crash_notes import Notes

_STREAMS = "standard input", "standard output", "standard error"


class Repair:
    """The repair of one rank's process.

    Args:
        link_fd: The link to the agent.
        notes_fd: The memory shared with the agent.
    """

    def __init__(self, link_fd: int, notes_fd: int) -> None:
        self.notes = Notes(notes_fd)
        self._own = {fd: process.identity(fd) for fd in (link_fd, notes_fd)}

    def after_cell(self, renew_streams: Callable[[], None]) -> None:
        """Repair the process, or end it.

        `renew_streams` replaces standard output and error by new pipes, and tells the agent.
        """
        if any(process.identity(fd) != opened for fd, opened in self._own.items()):
            self.leave(
                "the cell closed files that it had not opened (os.close or os.closerange), among them this rank's "
                "connection: close only the cell's own"
            )
        if lost := process.lost_descriptors():
            self._restore(lost, renew_streams)
        process.restore_python_streams()

    def _restore(self, lost: list[int], renew_streams: Callable[[], None]) -> None:
        for fd in filter(process.is_socket, lost):
            self.leave(
                f"the cell closed its {_STREAMS[fd]} (file descriptor {fd}), whose number a connection has now: to "
                "silence output, use contextlib.redirect_stdout(None)"
            )
        process.restore_input()
        if lost != [0]:
            renew_streams()

    def leave_after(self, error: Exception) -> NoReturn:
        """End this process after an error in this package's own code."""
        traceback.print_exc()
        process.flush_streams()
        self.leave(
            f"{type(error).__name__}: {error} was raised outside of the cell's own code, as when a cell has replaced "
            "functions of Python's modules"
        )

    def leave(self, cause: str) -> NoReturn:
        """End this process at once: its exit handlers may need what is damaged."""
        self.notes.cause(cause)
        os._exit(1)
