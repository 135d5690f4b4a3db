"""Handles SIGINT in a rank: it raises `KeyboardInterrupt` only while a cell runs, and not during an action that must be
completed. The signal arrives in the main thread; the control thread announces a stop.
"""

from __future__ import annotations

import signal
import sys
import threading
import types
from enum import Enum, auto

from jupyter_distrib.errors import ValueLost
from jupyter_distrib.system import file_owner
from jupyter_distrib.worker.failure import interrupt_in
from jupyter_distrib.worker.messenger import Messenger

ASKED_GRACE_S = 2.0
"""Maximum seconds by which a SIGINT may arrive before the command that explains it."""


class CellStage(Enum):
    """The stages of the execution of a cell; the moves between them are in the head of `process/execution.py`."""

    IDLE = auto()
    """No cell."""
    BEGINNING = auto()
    """Inputs are rebuilt, and the strategy, the profiler and the debugger begin."""
    RUNNING = auto()
    """The cell's own code runs."""
    RETURNING = auto()
    """The cell's own code has ended well: the strategy checks its value, and registered functions are called."""
    ENDING = auto()
    """The parts that have begun end in the reverse order, and leftovers of the cell are cleaned up."""
    PACKING = auto()
    """The value is pickled, which runs the user's code as well."""
    DEBUGGING = auto()
    """The debugger executes a command of the user, maybe after the cell has failed."""


_NOT_STOPPABLE = (CellStage.IDLE, CellStage.ENDING)


class Interrupts:
    """The stage of the cell, which decides whether an interrupt may be raised, and whether one has arrived and was
    requested."""

    def __init__(self, messenger: Messenger) -> None:
        self._messenger = messenger
        self.stage = CellStage.IDLE
        self.postponed = False
        """Whether an interrupt arrived while a library was being imported or an event sent; it is repeated later."""
        self._stopping = threading.Event()
        self._raised = False
        """Whether an interrupt was raised in the current run."""

    def install(self) -> None:
        signal.signal(signal.SIGINT, self.on_interrupt)
        shown = sys.unraisablehook

        def unless_stopped(unraisable: sys.UnraisableHookArgs) -> None:
            """Show an exception of a finalizer ("Exception ignored in ..."), unless a stop caused it."""
            if not self.stopping:
                shown(unraisable)

        sys.unraisablehook = unless_stopped

    def on_interrupt(self, signum: int, frame: types.FrameType | None) -> None:
        self.postponed = self._messenger.main_thread_sends or file_owner.importing_library(frame)
        if self.stage not in _NOT_STOPPABLE and not self.postponed:
            self._raised = True
            raise KeyboardInterrupt

    def end_if_stopping(self) -> None:
        """End a starting cell at once if it is already being stopped."""
        self._raised = False
        if self._stopping.is_set():
            raise KeyboardInterrupt

    # ---------------------------------------------------------------------------------------------- control thread

    def begin(self) -> None:
        """Clear the previous run's stop, because a new cell has arrived."""
        self._stopping.clear()
        self.postponed = False

    def stop(self) -> None:
        """Record that the current run is being stopped."""
        self._stopping.set()

    def repeat(self) -> None:
        """Repeat a postponed interrupt."""
        if self.postponed:
            self.raise_now()

    def raise_now(self) -> None:
        """Interrupt the main thread."""
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    def ended_cell(self, error: BaseException | None) -> bool:
        """Return whether a cell that ends with this error (or None) is being stopped and has little time left."""
        return self.stopping or (error is not None and self.caused(error))

    def caused(self, error: BaseException) -> bool:
        """Return whether a cell raised this error because it was stopped: a cut collective may raise any error."""
        if self.stopping:
            return not isinstance(error, ValueLost)
        if interrupt_in(error) is None:
            return False
        by_signal = self._raised or signal.getsignal(signal.SIGINT) != self.on_interrupt  # a library's own handler
        return by_signal and self._stopping.wait(ASKED_GRACE_S)
