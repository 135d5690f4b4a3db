"""The name by which kernels reach a server: its socket in a folder, and the lock that a kernel holds while it starts
one. Runs in the server's loop."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jupyter_distrib.system import paths


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
        """The file of this server; the name is another server's once a kernel has given this one up."""

    @property
    def reachable(self) -> bool:
        """Return whether the folder exists: /run/user is removed when a user logs out."""
        return self._lock.parent.exists()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep kernels from starting a server of this name meanwhile."""
        with paths.opened(self._lock) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def give_up(self) -> None:
        """Remove the socket. Once: afterwards the name may be another server's."""
        if not self._given_up:
            self._given_up = True
            if paths.inode(self._socket) == self._file:
                self._socket.unlink(missing_ok=True)
