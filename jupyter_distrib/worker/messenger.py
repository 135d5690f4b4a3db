"""Sends a rank's events. Any thread of the rank may send; a finalizer, which Python may call at any time, may do so in
the middle of another send.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.link import Link


class Messenger:
    """Sends events in order, each in one piece; the start of a cell is held back until the next event.

    Args:
        link: The link to the agent, on which another thread receives.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._lock = threading.RLock()
        self._in_send = False
        """Whether the thread that has `_lock` is inside a send."""
        self._meanwhile: list[m.Event] = []
        """Events that finalizers reported during the send."""
        self._start: m.Started | None = None
        self._begun = 0
        """Number of cells that have started."""
        self._due = 0
        """Number of the newest cell whose start must be sent without delay."""
        self.main_thread_sends = False
        """Whether an interrupt now would cut an event in two."""

    def begin(self, started: m.Started) -> None:
        """Hold back the start of a cell until something else is sent or `announce` is called; send it at once if that
        was called before, while the main thread was busy."""
        with self._lock:
            self._begun += 1
            late = self._begun <= self._due
            self._start = None if late else started
        if late:
            self.send(started)

    def announce(self, cell: int) -> None:
        """Send the start of a cell, numbered from 1, unless it was sent; if the cell has not started, as soon as it
        does."""
        with self._lock:
            self._due = cell
            started, self._start = self._start, None
            if started is not None:
                self._send(started)

    def send(self, event: m.Event, fds: Sequence[int] = ()) -> None:
        """Send an event, preceded by the start of the cell if that was held back."""
        is_main, before = threading.current_thread() is threading.main_thread(), self.main_thread_sends
        if is_main:
            self.main_thread_sends = True
        try:
            with self._lock:
                started, self._start = self._start, None
                # `Returned` says when the cell began: one event less on the path of a warm cell (benchmarks, `noop`).
                earlier = () if started is None or isinstance(event, m.Returned) else (started,)
                self._send(event, fds, after=earlier)
        finally:
            if is_main:
                self.main_thread_sends = before

    def _send(self, event: m.Event, fds: Sequence[int] = (), after: Sequence[m.Event] = ()) -> None:
        """Send an event with `_lock` held, or queue it after the send in progress."""
        if self._in_send:
            self._meanwhile.append(event)
            return
        self._in_send = True
        try:
            self._link.send(event, fds, after=after)
            while self._meanwhile:
                self._link.send(self._meanwhile.pop(0))
        finally:
            self._in_send = False
