"""Exchanges one text per rank, such as an address, without a framework's help. Rank's main thread.

Rank 0 serves on the socket that the agent has bound for it; the others connect, send their texts, and get all texts.
Texts are JSON: nothing that comes from a socket is unpickled. A rank that waits in an exchange is released by SIGINT,
or when its sockets are shut down.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from jupyter_distrib.system import network_interfaces

HOST = "127.0.0.1"
_FIRST_WORD_S = 5.0
"""Seconds for a connected peer to send its text: a peer that sends nothing is not a rank."""
_LINE_BYTES = 1 << 20
"""Longest text of a rank, which limits what a stranger can send."""
_MOST_WAITING = 256
"""Maximum number of connected peers that have sent nothing yet; beyond that, the oldest is closed."""


class PlainGroups:
    """The `Groups` of a rank whose framework keeps no process groups in this package."""

    ends_at_reset = False

    def __init__(self, rank: int, world_size: int) -> None:
        self.apart = False
        self._rank, self._world_size = rank, world_size
        self._host, self._port = HOST, 0
        self._listener: socket.socket | None = None
        self._run, self._exchanges = "", 0

    def reset(self, host: str, port: int, listen_fd: int) -> None:
        if self._listener is not None:
            self._listener.close()
        self._host, self._port, self.apart = host, port, False
        self._listener = socket.socket(fileno=listen_fd) if listen_fd >= 0 else None

    def environment(self) -> dict[str, str]:
        return {"MASTER_ADDR": self._host, "MASTER_PORT": str(self._port + 1)}

    def begin(self, run: str) -> None:
        self._run, self._exchanges, self.apart = run, 0, False

    def arrived(self) -> None:
        """Do nothing, see `wait_for_arrivals`."""

    def wait_for_arrivals(self, *, until: Callable[[], bool]) -> None:
        """Do nothing: an exchange has answered all ranks when it returns on rank 0."""

    def tidy(self) -> None:
        """Do nothing, since an exchange leaves nothing behind."""

    def sequence(self) -> int:
        return -1

    def abort(self, then: Callable[[], None]) -> None:
        """Call `then` at once, since shutting the sockets down releases every wait."""
        then()

    def wait_s(self) -> float:
        return 0.0

    def can_stay(self) -> bool:
        """Return False, since nothing is known of the groups that the strategy's framework creates."""
        return False

    def keep(self) -> None:
        """Do nothing."""

    def exchange(self, text: str) -> tuple[str, ...]:
        self._exchanges += 1
        occasion = f"{self._run}/{self._exchanges}"
        return self._serve(occasion, text) if self._rank == 0 else self._ask(occasion, text)

    def _ask(self, occasion: str, text: str) -> tuple[str, ...]:
        connect = socket.create_connection if self._host == HOST else network_interfaces.reach_first_node
        with connect((self._host, self._port)) as sock, sock.makefile("rw", encoding="utf-8") as peer:
            sock.settimeout(None)
            print(json.dumps([occasion, self._rank, text]), file=peer, flush=True)
            if not (answer := peer.readline()):
                raise ConnectionError("rank 0 has left before all ranks had met.")
        return tuple(json.loads(answer))

    def _serve(self, occasion: str, text: str) -> tuple[str, ...]:
        """Collect the texts of all ranks, then answer; connections from an earlier run that was stopped are closed."""
        if self._listener is None:
            raise ConnectionError("this rank has not met the others yet: run the cell again.")
        texts, peers = {0: text}, []
        callers = _Callers(self._listener)
        try:
            while len(texts) < self._world_size:
                sock, line = callers.next()
                greeting = _greeting(line)
                if greeting is None or greeting[0] != occasion or not 0 < greeting[1] < self._world_size:
                    sock.close()
                    continue
                peers.append(sock)
                texts[greeting[1]] = greeting[2]
            answer = (json.dumps([texts[rank] for rank in range(self._world_size)]) + "\n").encode()
            for sock in peers:
                with suppress(OSError):
                    sock.sendall(answer)
        finally:
            callers.close()
            for sock in peers:
                sock.close()
        return tuple(texts[rank] for rank in range(self._world_size))


@dataclass(slots=True)
class _Caller:
    """A connected peer that has not sent its line yet."""

    until_s: float
    line: bytearray = field(default_factory=bytearray)


class _Callers:
    """The connecting peers. None of them blocks a peer that has sent data."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener, self._waiting = listener, dict[socket.socket, _Caller]()
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)

    def next(self) -> tuple[socket.socket, bytes]:
        """Return the next peer that has sent a line, and the line. Raises `OSError` if the listener is shut down."""
        while True:
            first = next(iter(self._waiting.values()), None)
            left_s = None if first is None else max(0.0, first.until_s - time.monotonic())
            for key, _ in self._selector.select(left_s):
                said: tuple[socket.socket, bytes] | None = key.data()
                if said is not None:
                    return said
            for sock in [sock for sock, each in self._waiting.items() if each.until_s <= time.monotonic()]:
                self._drop(sock)

    def close(self) -> None:
        for sock in [*self._waiting]:
            self._drop(sock)
        self._selector.close()

    def _accept(self) -> None:
        with suppress(BlockingIOError, ConnectionAbortedError):
            sock, _ = self._listener.accept()
            sock.setblocking(False)
            self._waiting[sock] = _Caller(until_s=time.monotonic() + _FIRST_WORD_S)
            self._selector.register(sock, selectors.EVENT_READ, lambda: self._read(sock))
        if len(self._waiting) > _MOST_WAITING:
            self._drop(next(iter(self._waiting)))  # a rank sends its text at once

    def _read(self, sock: socket.socket) -> tuple[socket.socket, bytes] | None:
        """Return a peer and its line once it is complete. A peer that has left, or sends too much, is dropped."""
        if (caller := self._waiting.get(sock)) is None:
            return None  # the peer was dropped a moment ago
        part = b""
        with suppress(OSError):
            part = sock.recv(_LINE_BYTES - len(caller.line))
        caller.line += part
        if caller.line.endswith(b"\n"):
            self._selector.unregister(sock)
            del self._waiting[sock]
            sock.setblocking(True)
            return sock, bytes(caller.line)
        if not part or len(caller.line) >= _LINE_BYTES:
            self._drop(sock)
        return None

    def _drop(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        del self._waiting[sock]
        sock.close()


def _greeting(line: bytes) -> tuple[str, int, str] | None:
    """Parse the first message of a peer as (occasion, rank, text); None for a peer that is not a rank."""
    with suppress(ValueError, RecursionError):
        match json.loads(line):
            case [str(occasion), int(rank), str(text)]:
                return occasion, rank, text
    return None
