"""Lets other threads call functions in a loop."""

from __future__ import annotations

import os
import queue
from contextlib import suppress

from jupyter_distrib.system.event_loop import Callback, Loop, pipe


class CallSoon:
    """A queue of calls: `put` them in any thread, and they run in the loop's thread, in order."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._queue: queue.SimpleQueue[Callback] = queue.SimpleQueue()
        self._read_fd, self._write_fd = pipe()
        loop.watch(self._read_fd, self._woken)

    def put(self, call: Callback) -> None:
        self._queue.put(call)
        if self._loop.is_here:
            return self._loop.soon(self._handle)
        with suppress(BlockingIOError):  # full: the loop will wake anyway
            os.write(self._write_fd, b"!")

    def _woken(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._read_fd, 4096)
        self._handle()

    def _handle(self) -> None:
        while not self._queue.empty():
            self._loop.call(self._queue.get())

    def close(self) -> None:
        """Stop handling calls."""
        self._loop.watch(self._read_fd, None)
        os.close(self._read_fd)
        os.close(self._write_fd)
