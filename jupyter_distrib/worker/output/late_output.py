"""Attributes the output of threads that outlive their cell to their own run, not to a later cell.

Costs nothing unless such a thread exists: only then is the streams' `write` replaced. Runs in the rank's main thread.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from functools import partial

from jupyter_distrib.wire import messages as m


class LateThreads:
    """Sends the output of threads that outlived their run to that run's log."""

    def __init__(self, rank: int, send: Callable[[m.Wrote], None]) -> None:
        self._rank, self._send = rank, send
        self._run_of: dict[threading.Thread, str] = {}
        self._before: set[threading.Thread] | None = None
        """The threads that existed before the current cell; None between cells and while a cell is being prepared."""

    def begin(self) -> None:
        """Record the existing threads. Called before a cell."""
        self._before = set(threading.enumerate())
        self._route()

    def end(self, run: str) -> None:
        """Treat the cell's threads that are still running as late from now on. Called before the cell's end is
        reported, even if it was stopped before it began."""
        before, self._before = self._before, None
        if before is not None:
            self._run_of |= {thread: run for thread in threading.enumerate() if thread not in before}
            self._route()

    def _route(self) -> None:
        self._run_of = {thread: run for thread, run in self._run_of.items() if thread.is_alive()}
        for name in ("stdout", "stderr"):
            stream = getattr(sys, f"__{name}__")
            setattr(sys, name, stream)
            vars(stream).pop("write", None)
            if self._run_of:  # on the stream itself: log handlers hold it
                vars(stream)["write"] = partial(self._write, stream.write, name, self._run_of)

    def _write(self, write: Callable[[str], int], stream: str, run_of: dict[threading.Thread, str], text: str) -> int:
        run = run_of.get(threading.current_thread())
        if run is None:
            return write(text)
        self._send(m.Wrote(run=run, rank=self._rank, stream=stream, text=text, at_s=time.monotonic()))
        return len(text)
