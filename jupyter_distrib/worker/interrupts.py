"""When SIGINT becomes `KeyboardInterrupt` in a rank: only while a cell runs, and in the midst of nothing that must be
whole. The signal arrives in the main thread; a stop is announced by the control thread.
"""

from __future__ import annotations

import signal
import threading
import types

from jupyter_distrib.errors import ValueLost
from jupyter_distrib.system import library_imports
from jupyter_distrib.worker.failure import interrupt_in
from jupyter_distrib.worker.messenger import Messenger

ASKED_GRACE_S = 2.0
"""A SIGINT may overtake the command that explains it by this much."""


class Interrupts:
    """The state of interrupts: whether one may come, has come, and was asked for."""

    def __init__(self, messenger: Messenger) -> None:
        self._messenger = messenger
        self.allowed = False
        """A cell runs."""
        self.postponed = False
        """One came while a library was being imported, or an event was being sent; it is tried again."""
        self._stopping = threading.Event()

    def install(self) -> None:
        signal.signal(signal.SIGINT, self.on_interrupt)

    def on_interrupt(self, signum: int, frame: types.FrameType | None) -> None:
        self.postponed = self._messenger.main_thread_sends or library_imports.importing_library(frame)
        if self.allowed and not self.postponed:
            raise KeyboardInterrupt

    def allow(self) -> None:
        """Begin a cell, or end it at once if it is being stopped already."""
        self.allowed = True
        if self._stopping.is_set():
            raise KeyboardInterrupt

    # ---------------------------------------------------------------------------------------------- control thread

    def begin(self) -> None:
        """Forget the stop of the run before: a cell has come."""
        self._stopping.clear()
        self.postponed = False

    def stop(self) -> None:
        """Note that the current run is being stopped."""
        self._stopping.set()

    def repeat(self) -> None:
        """Interrupt once more, if one could not be let through."""
        if self.postponed:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    def caused(self, error: BaseException) -> bool:
        """Return whether a cell raised this because it was stopped: a collective that was cut raises anything."""
        if self.stopping:
            return not isinstance(error, ValueLost)
        return interrupt_in(error) is not None and self._stopping.wait(ASKED_GRACE_S)
