"""The observer that saves each run in the history, a moment after its end or that of the runs that follow at once.
`observe` is called in the pool's thread and returns at once; a thread of its own writes.

It never fails a run: where nothing can be written, the next run says so, once.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Sequence

from jupyter_distrib.kernel.record.observer import ObservedRun, Observer
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.wire import messages as m

WAIT_S = 0.3
"""Seconds that an ended run waits for others, so that writing does not slow down quick cells."""
MOST_S = 2.0
"""Maximum seconds that a run waits while others keep ending."""
FLUSH_S = 2.0
"""Maximum seconds that kernel shutdown waits for the last runs to be written."""

Write = Callable[[Sequence[tuple[ObservedRun, RunRecord]]], None]


class HistoryWriter:
    """The writer of one kernel.

    Args:
        write: Saves runs; called in the writer's thread.
    """

    def __init__(self, write: Write) -> None:
        self._write = write
        self._waiting: list[tuple[ObservedRun, RunRecord]] = []
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._news, self._hurry, self._idle = threading.Event(), threading.Event(), threading.Event()
        self._idle.set()
        self._is_closed = False
        self.trouble = ""
        """The reason for not having saved a run; empty if all have been saved."""
        self._has_noted = False
        atexit.register(self.flush)

    def follow(self, run: ObservedRun) -> Observer:
        """Return the observer of a run."""
        if sentence := self.unreported():
            run.note(sentence)
        return _AtEnd(self, run)

    def unreported(self) -> str:
        """Return a sentence on runs that are not saved, once; else an empty string."""
        if not self.trouble or self._has_noted:
            return ""
        self._has_noted = True
        return f"Runs are not saved in the history: {self.trouble}"

    def put(self, run: ObservedRun, record: RunRecord) -> None:
        """Save a run that has ended, shortly."""
        with self._lock:
            self._waiting.append((run, record))
            self._idle.clear()
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="jupyter_distrib-history", daemon=True)
                thread.start()
                self._thread = thread
        if not self._news.is_set():
            self._news.set()

    def flush(self) -> None:
        """Wait, for a bounded time, until all runs that have ended are written."""
        self._hurry.set()
        with self._lock:  # a thread that has just been made can only be waited for when it has started
            thread = self._thread
        if thread is not None and thread.is_alive():  # a forked process has none
            self._idle.wait(FLUSH_S)
        self._hurry.clear()

    def close(self) -> None:
        """Wait as `flush` does; then the thread ends, also that of a run that ends later."""
        self.flush()
        self._is_closed = True
        self._news.set()

    def _work(self) -> None:
        while True:
            self._news.wait()
            if self._waiting:
                self._gather()
            self._news.clear()
            with self._lock:
                runs, self._waiting = self._waiting, []
            if runs:
                self._save(runs)
            with self._lock:
                if not self._waiting:
                    self._idle.set()
                    if self._is_closed:
                        self._thread = None
                        return

    def _save(self, runs: Sequence[tuple[ObservedRun, RunRecord]]) -> None:
        """Write runs together, or one by one if that fails, so that a run that cannot be written does not affect the
        others."""
        try:
            self._write(runs)
        except Exception as error:  # noqa: BLE001 - whatever it is, the runs are not to suffer
            self.trouble = str(error)
            for each in runs if len(runs) > 1 else ():
                self._save([each])

    def _gather(self) -> None:
        """Wait until no run has ended for a while: reading the folder once costs as much as writing several runs."""
        until_s, count = time.monotonic() + MOST_S, len(self._waiting)
        while not self._hurry.wait(WAIT_S) and len(self._waiting) > count and time.monotonic() < until_s:
            count = len(self._waiting)


class _AtEnd(Observer):
    """The observer of one run, which saves it when it ends."""

    __slots__ = ("_run", "_writer")

    def __init__(self, writer: HistoryWriter, run: ObservedRun) -> None:
        self._writer, self._run = writer, run

    def observe(self, event: m.RunEvent, record: RunRecord) -> None:
        if type(event) is m.Ended:
            self._writer.put(self._run, record)
