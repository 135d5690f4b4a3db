"""The server to which Spark tasks send the output, reports and exceptions of their ranks. Kernel side; one thread per
connection.

It listens where the executors can reach it, so anybody on that network can connect. A connection is accepted once it
has sent a line with the run's token; until then it gets little memory and time, and nothing from it is shown.
"""

from __future__ import annotations

import socket
import socketserver
import struct
import threading
import time
from contextlib import suppress
from typing import Protocol

MOST_BYTES = 1 << 16
"""Longest line: Spark's client sends at most 4000 characters and a note that the rest is left out."""
HELD_BYTES = 1 << 16
"""Bytes of lines to hold until the token arrives: torchrun's lines come before a rank's first one."""
FIRST_S = 600.0
"""Seconds within which the token must arrive, which a rank sends once it has imported torch."""
LINE_S = 60.0
"""Seconds within which a line must be complete."""
END_S = 0.1
"""Maximum seconds that a shutdown takes."""
MOST_UNKNOWN = 512
"""Maximum number of connections without the token at a time; further ones are closed at once."""


class RunLines(Protocol):
    """Reads the lines."""

    def knows(self, line: str) -> bool:
        """Return whether a line has the run's token."""

    def read(self, line: str, rank: int = 0) -> int:
        """Process a line; unmarked lines are attributed to `rank`. Return the rank of the line."""


class LogServer:
    """Replaces Spark's `LogStreamingServer`: passes lines on to the run, listens on the driver's address only, and
    accepts no lines from strangers."""

    def __init__(self, lines: RunLines) -> None:
        self._lines = lines
        self._server: socketserver.ThreadingTCPServer | None = None
        self._lock = threading.Lock()
        self._unknown: set[socket.socket] = set()
        """Connections that have not sent the token."""
        self.port: int | None = None

    def start(self, spark_host_address: str = "") -> None:
        serve = self._serve

        class LineHandler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with suppress(OSError, EOFError):
                    serve(self.request)

        self._server = server = socketserver.ThreadingTCPServer((spark_host_address, 0), LineHandler)
        server.daemon_threads = True
        self.port = server.server_address[1]
        threading.Thread(target=server.serve_forever, args=(END_S,), name="jupyter_distrib-lines", daemon=True).start()

    def shutdown(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        with self._lock:
            for sock in self._unknown:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _serve(self, sock: socket.socket) -> None:
        with self._lock:
            if len(self._unknown) >= MOST_UNKNOWN:
                return
            self._unknown.add(sock)
        try:
            held = self._until_known(sock)
        finally:
            with self._lock:
                self._unknown.discard(sock)
        rank = 0
        for line in held:
            rank = self._lines.read(line, rank)
        while True:
            rank = self._lines.read(_line(sock), rank)

    def _until_known(self, sock: socket.socket) -> list[str]:
        """Return the lines up to the first one with the token. Raises `EOFError` or `OSError` if it does not come."""
        held: list[str] = []
        until_s, left = time.monotonic() + FIRST_S, HELD_BYTES
        while True:
            line = _line(sock, until_s)
            if self._lines.knows(line):
                return [*held, line]
            if (left := left - len(line.encode())) >= 0:
                held.append(line)


def _line(sock: socket.socket, until_s: float | None = None) -> str:
    """Return the next line, which must arrive before the time `until_s`. Raises `EOFError` or `OSError`."""
    size = struct.unpack(">i", _exactly(sock, 4, until_s))[0]
    if not 0 <= size <= MOST_BYTES:
        raise EOFError
    soon_s = time.monotonic() + LINE_S
    return _exactly(sock, size, soon_s if until_s is None else min(until_s, soon_s)).decode("utf-8", "replace")


def _exactly(sock: socket.socket, count: int, until_s: float | None) -> bytes:
    data = bytearray()
    while len(data) < count:
        left_s = None if until_s is None else until_s - time.monotonic()
        if left_s is not None and left_s <= 0:
            raise TimeoutError
        sock.settimeout(left_s)
        if not (part := sock.recv(count - len(data))):
            raise EOFError
        data += part
    return bytes(data)
