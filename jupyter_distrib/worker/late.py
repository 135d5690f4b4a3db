"""Threads that a cell started and that go on after it: what they print belongs to their own run, not to a later cell.

Costs nothing unless such a thread exists: only then `sys.stdout` and `sys.stderr` are replaced by a router. Runs in the
rank's main thread.
"""

from __future__ import annotations

import io
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from jupyter_distrib.events import Wrote


class LateThreads:
    """Knows which threads outlived the run that started them, and sends what they print to that run's log."""

    def __init__(self, rank: int, send: Callable[[Wrote], None]) -> None:
        self._rank, self._send = rank, send
        self._run_of: dict[threading.Thread, str] = {}
        self._before: set[threading.Thread] = set()

    def begin(self) -> None:
        """Called before a cell."""
        self._before = set(threading.enumerate())
        self._route()

    def end(self, run: str) -> None:
        """Called after a cell, before its end is told: its threads that still run are late from now on."""
        self._run_of |= {thread: run for thread in threading.enumerate() if thread not in self._before}
        self._route()

    def _route(self) -> None:
        self._run_of = {thread: run for thread, run in self._run_of.items() if thread.is_alive()}
        late = {thread.ident: run for thread, run in self._run_of.items()}
        sys.stdout = _Router(sys.__stdout__, "stdout", late, self._wrote) if late else sys.__stdout__
        sys.stderr = _Router(sys.__stderr__, "stderr", late, self._wrote) if late else sys.__stderr__

    def _wrote(self, run: str, stream: str, text: str) -> None:
        self._send(Wrote(run=run, rank=self._rank, stream=stream, text=text, at_s=time.monotonic()))


class _Router(io.TextIOBase):
    """A standard stream in which late threads write elsewhere."""

    def __init__(
        self, stream: Any, name: str, late: dict[int | None, str], wrote: Callable[[str, str, str], None]
    ) -> None:
        self._stream, self._name, self._late, self._wrote = stream, name, late, wrote

    def __getattr__(self, name: str) -> Any:  # `buffer` and whatever else the real stream has
        return getattr(self._stream, name)

    def fileno(self) -> int:
        return int(self._stream.fileno())

    def writable(self) -> bool:
        return True

    def flush(self) -> None:
        self._stream.flush()

    def write(self, text: str) -> int:
        run = self._late.get(threading.get_ident())
        if run is None:
            return int(self._stream.write(text))
        self._wrote(run, self._name, text)
        return len(text)
