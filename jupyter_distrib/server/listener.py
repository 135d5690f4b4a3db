"""Accepts kernels, and turns them away when the process may open no more files. Runs in the server's loop."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from jupyter_distrib.system import open_files, paths
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.link import encode, peer_uid

BACKLOG = 64
"""Maximum number of kernels that wait to be accepted."""


class Listener:
    """A socket to which kernels of this user connect.

    Args:
        sock: The bound socket.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._spare = -1
        """Spare descriptor that is closed to accept (and turn away) a kernel that would otherwise wait forever."""

    def fileno(self) -> int:
        return self._sock.fileno()

    def listen(self) -> None:
        self._keep_spare()
        self._sock.setblocking(False)
        self._sock.listen(BACKLOG)  # once more: from now on SO_PEERCRED names this process, not the one that started it

    def accept(self) -> socket.socket | None:
        """Return the connection of a kernel; None if there is none, or it is another user's, or there is no room."""
        self._keep_spare()
        try:
            sock, _ = self._sock.accept()
        except OSError as error:
            if open_files.advice_on(error):
                self._turn_away()
            return None
        if peer_uid(sock) not in (None, os.getuid()):
            sock.close()
            return None
        sock.setblocking(False)
        return sock

    def _turn_away(self) -> None:
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1
        with suppress(OSError):
            sock, _ = self._sock.accept()
            with sock:
                sock.setblocking(False)
                sock.send(encode(m.NotServed(reason=open_files.advice())))
        self._keep_spare()

    def _keep_spare(self) -> None:
        """Open the spare descriptor, unless it is open or another thread has just taken its place."""
        if self._spare < 0:
            with suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY)


class SocketName:
    """The name of one server.

    Args:
        directory: The folder of sockets and locks.
        name: The server's name in that folder.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self._lock, self._socket = directory / f"{name}.lock", directory / f"{name}.sock"
        self._given_up = False
        self._file = paths.inode(self._socket)
        """Inode of this server's socket: the name belongs to another server once a kernel has given this one up."""

    @property
    def reachable(self) -> bool:
        """Return whether the folder exists: /run/user is removed when a user logs out."""
        return self._lock.parent.exists()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep kernels from starting a server of this name within the block."""
        with paths.opened(self._lock) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def give_up(self) -> None:
        """Remove the socket. Once: afterwards the name may be another server's."""
        if not self._given_up:
            self._given_up = True
            if paths.inode(self._socket) == self._file:
                self._socket.unlink(missing_ok=True)
