"""The only place where the agent waits: for descriptors, timers and ending children. Single-threaded.

Callbacks run one after another and must not block.
"""

from __future__ import annotations

import heapq
import itertools
import os
import selectors
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

Callback = Callable[[], None]


class Timer:
    """A delayed call that can be cancelled."""

    __slots__ = ("call",)

    def __init__(self, call: Callback) -> None:
        self.call: Callback | None = call

    def cancel(self) -> None:
        self.call = None


class Timers:
    """Delayed calls that can all be cancelled at once."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._timers: list[Timer] = []

    def later(self, delay_s: float, call: Callback) -> None:
        self._timers.append(self._loop.later(delay_s, call))

    def cancel(self) -> None:
        for timer in self._timers:
            timer.cancel()


class Loop:
    """A loop that waits for everything at once and calls what was registered for it.

    Args:
        on_error: Handles exceptions of callbacks, and the loop continues; without it, an exception ends the loop.
    """

    def __init__(self, on_error: Callable[[Exception], None] | None = None) -> None:
        self._on_error = on_error
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._running = True
        self._thread = 0
        self._soon: list[Callback] = []
        self.on_child_ended: Callback = lambda: None

    def watch(self, fd: int, on_readable: Callback | None, on_writable: Callback | None = None) -> None:
        """Replace the callbacks of a descriptor; both None: stop watching it."""
        events = (selectors.EVENT_READ if on_readable else 0) | (selectors.EVENT_WRITE if on_writable else 0)
        known = fd in self._selector.get_map()
        if events and known:
            self._selector.modify(fd, events, (on_readable, on_writable))
        elif events:
            self._selector.register(fd, events, (on_readable, on_writable))
        elif known:
            self._selector.unregister(fd)

    def later(self, delay_s: float, call: Callback) -> Timer:
        timer = Timer(call)
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._order), timer))
        return timer

    def soon(self, call: Callback) -> None:
        """Call once all pending events are handled, before waiting again."""
        self._soon.append(call)

    def stop(self) -> None:
        self._running = False

    @property
    def is_here(self) -> bool:
        """Return whether the loop runs in the calling thread."""
        return self._thread == threading.get_ident()

    def run(self) -> None:
        """Serve until `stop`. The end of a child wakes the loop through the signal's wakeup descriptor."""
        read_fd, write_fd = pipe()
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.watch(read_fd, lambda: self._woken(read_fd))
        try:
            self._run()
        finally:
            signal.set_wakeup_fd(-1)
            self.watch(read_fd, None)
            os.close(read_fd)
            os.close(write_fd)

    def _run(self) -> None:
        self._thread = threading.get_ident()
        self.on_child_ended()
        while self._running:
            for key, mask in self._selector.select(self._wait_s()):
                self._dispatch(key.fd, key.data, mask)
            self._fire()
            while self._soon:
                calls, self._soon = self._soon, []
                for call in calls:
                    self.call(call)

    def call(self, call: Callback, fd: int | None = None) -> None:
        """Run a callback. A descriptor whose callback raises is no longer watched: it would be called again at once."""
        try:
            call()
        except Exception as error:
            if self._on_error is None:
                raise
            self._on_error(error)
            if fd is not None and self._selector.get_map().get(fd) is not None:
                self._selector.unregister(fd)

    def _dispatch(self, fd: int, calls: Any, mask: int) -> None:
        known = self._selector.get_map().get(fd)
        if known is None or known.data is not calls:
            return  # an earlier callback of this round has changed it
        on_readable, on_writable = calls
        if mask & selectors.EVENT_WRITE and on_writable:
            self.call(on_writable, fd)
        if mask & selectors.EVENT_READ and on_readable:
            self.call(on_readable, fd)

    def _woken(self, fd: int) -> None:
        os.read(fd, 4096)
        self.call(self.on_child_ended)  # with an error of which this descriptor has nothing to do

    def _wait_s(self) -> float | None:
        while self._timers and self._timers[0][2].call is None:
            heapq.heappop(self._timers)
        return max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None

    def _fire(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            call = heapq.heappop(self._timers)[2].call
            if call is not None:
                self.call(call)


def pipe() -> tuple[int, int]:
    """Return a pipe's ends for reading and for writing, neither of which blocks or is inherited."""
    if hasattr(os, "pipe2"):
        return os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    os.set_blocking(write_fd, False)
    return read_fd, write_fd
