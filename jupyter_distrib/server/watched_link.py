"""A link served by a loop: it sends without blocking, and delivers messages by callback. Runs in the loop of an
agent."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

from jupyter_distrib.system import open_files
from jupyter_distrib.system.event_loop import Loop
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.descriptors import Descriptors
from jupyter_distrib.wire.link import Link, LinkError, encode


class WatchedLink:
    """One end of a connected socket, watched by a loop until either end is closed.

    Args:
        on_message: Takes each message; its descriptors are closed afterwards.
        on_end: Called once when the other end is closed and all that it has sent was read.
    """

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        *,
        on_message: Callable[[m.Message, Sequence[int]], None],
        on_end: Callable[[], None],
    ) -> None:
        sock.setblocking(False)
        self._loop, self._link = loop, Link(sock)
        self._on_message, self._on_end = on_message, on_end
        self._watch()

    @property
    def closed(self) -> bool:
        return self._link.fileno() < 0

    def post(self, message: m.Message, fds: Sequence[int] = ()) -> None:
        self.post_frame(encode(message, len(fds)), fds)

    def post_frame(self, frame: bytes, fds: Sequence[int] = ()) -> None:
        """Send a frame, queueing what the socket does not accept now; `fds` are duplicated. Nothing happens if the
        other end is closed, which `on_end` reports. Raises `OSError` where this process may not open the duplicates."""
        if self.closed:
            return
        try:
            self._link.post(frame, fds)
            self._link.flush()
        except OSError as error:
            if open_files.advice_on(error):
                raise
            return
        if self._link.unsent:
            self._watch()

    def read_rest(self) -> None:
        """Read everything that has arrived once the peer has ended; a child of the peer may still hold its end open."""
        while self._read():
            if not self._link.wait(0):
                break

    def close(self) -> None:
        if not self.closed:
            self._loop.watch(self._link.fileno(), None)
            self._link.close()

    def _watch(self) -> None:
        self._loop.watch(self._link.fileno(), self._readable, self._flush if self._link.unsent else None)

    def _flush(self) -> None:
        try:
            self._link.flush()
        except OSError:
            return
        self._watch()

    def _readable(self) -> None:
        if not self._read() and not self.closed:
            self._loop.watch(self._link.fileno(), None)
            self._on_end()

    def _read(self) -> bool:
        """Deliver the messages that have arrived; return False when the other end is closed."""
        try:
            for message, fds in self._link.read():
                with Descriptors(fds):
                    self._on_message(message, fds)
        except (EOFError, OSError, LinkError):
            return False
        return True
