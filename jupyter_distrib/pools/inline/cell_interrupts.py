"""Interrupts a cell whose ranks have no processes, in the thread that executes it."""

from __future__ import annotations

import ctypes
import itertools
import signal
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

AGAIN_AFTER_S = (0.12, 0.28, 0.6, 1.0)
"""Seconds between interrupts; the last value applies to all further ones. Ranks with processes are killed instead."""


class CellInterrupts:
    """A guard that delivers interrupts to the cell only, and lets the surrounding code check for them.

    In the main thread the notebook's own handler of SIGINT is still called, only later. A thread that has no signals,
    or blocks them, gets the exception at the cell's next line when `ask` is called. It is repeated until the cell ends:
    a finalizer or an `except` of the cell may swallow it.
    """

    def __init__(self) -> None:
        self.asked = False
        self._inside = False
        self._due = False
        """Whether a signal sent by `ask` is pending."""
        self._raised: list[BaseException] = []
        """The exceptions that interrupts have raised in the cell."""
        self._over, self._repeating = threading.Event(), False
        self._thread = threading.get_ident()
        self._takes_signals = threading.current_thread() is threading.main_thread() and not _is_blocked(signal.SIGINT)
        self._handle: Callable[[int, types.FrameType | None], None] | None = None
        self._lock = threading.RLock()

    def ask(self) -> None:
        """Stop the run; from any thread."""
        with self._lock:
            self.asked = True
            if threading.get_ident() == self._thread:
                return
            self._interrupt()
            if not self._repeating:
                self._repeating = True
                threading.Thread(target=self._repeat, name="jupyter_distrib-stop", daemon=True).start()

    def end(self) -> None:
        """Stop repeating, because the run has ended."""
        self._over.set()

    def _interrupt(self) -> None:
        """Raise the exception in the cell, if it runs. Called with `_lock` held."""
        if self._inside and self._takes_signals:
            self._due = True
            signal.pthread_kill(self._thread, signal.SIGINT)
        elif self._inside:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self._thread), ctypes.py_object(KeyboardInterrupt)
            )

    def _repeat(self) -> None:
        for wait_s in itertools.chain(AGAIN_AFTER_S, itertools.repeat(AGAIN_AFTER_S[-1])):
            if self._over.wait(wait_s):
                return
            with self._lock:
                self._interrupt()

    def caused(self, error: BaseException) -> bool:
        """Return whether an exception of the cell was caused by an interrupt, and so ends the run.

        An exception from another alarm or raised by the cell itself is an error even if a stop was requested.
        """
        errors, raised = list(_with_contexts(error)), self._raised
        self._raised = []  # the exceptions hold the frames of the cell
        if self._takes_signals and self._handle is not None and signal.getsignal(signal.SIGINT) is self._handle:
            caused = any(each is one for each in errors for one in raised)
        else:  # no signal has raised it, or the cell's own handler has
            is_asked = self.asked or not self._takes_signals
            caused = is_asked and any(isinstance(each, KeyboardInterrupt) for each in errors)
        self.asked = self.asked or caused
        return caused

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Handle interrupts while the run lasts."""
        try:
            with self._handled():
                yield
        finally:
            self.end()

    @contextmanager
    def _handled(self) -> Iterator[None]:
        before = signal.getsignal(signal.SIGINT) if self._takes_signals else None
        if before is None:  # a signal for another thread, or for C code
            yield
            return

        def handle(signum: int, frame: types.FrameType | None) -> None:
            self._interrupted(before, signum, frame)

        self._handle = handle
        signal.signal(signal.SIGINT, handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _interrupted(self, before: Any, signum: int, frame: types.FrameType | None) -> None:
        """Handle a signal as the previous handler would have; a signal that is ignored here still stops a run that was
        asked to stop."""
        is_ours, self._due = self._due, False
        if not self._inside:
            self.asked = self.asked or before != signal.SIG_IGN
            return
        try:
            if callable(before):
                before(signum, frame)
            elif before == signal.SIG_DFL and not is_ours:
                signal.signal(signum, signal.SIG_DFL)
                signal.raise_signal(signum)
            if is_ours:
                raise KeyboardInterrupt
        except BaseException as error:
            self._raised.append(error)
            raise

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Allow interrupts while the cell's own code runs."""
        try:
            self._inside = True
            if self.asked:
                self._raised.append(KeyboardInterrupt())
                raise self._raised[-1]
            yield
        finally:
            self._inside = False
            with self._lock:  # a thread that was about to interrupt the cell has done so
                pass


def _is_blocked(number: int) -> bool:
    return number in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def _with_contexts(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and the exceptions that were being handled when it was raised."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ if current.__context__ is None else current.__context__
