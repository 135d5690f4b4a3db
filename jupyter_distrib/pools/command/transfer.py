"""Carries the parts of large values to the hosts: through the pipes, or as files of a folder that all of them share.
See `coordinator/part_transfer.py`."""

from __future__ import annotations

import errno
import os
import re
import secrets
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

from jupyter_distrib.coordinator.part_transfer import Carrier, Taking

SHARED_FROM_BYTES = 32 << 20
"""Size in bytes from which a value is sent through a shared folder."""
PREFIX = ".jupyter_distrib-"
"""First part of the names of such folders."""
LEFT_S = 3600.0
"""Age in seconds from which such a folder counts as left by a killed coordinator."""
_NAME = re.compile(r"[0-9a-f]{32}")
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def carrier(fds: Sequence[int], folder: str) -> Carrier:
    """Return the carrier for a content (`shared_memory.Arriving`); `folder` is a folder shared by all hosts, or
    empty."""
    return SharedFolder(folder) if folder and os.fstat(fds[0]).st_size >= SHARED_FROM_BYTES else Pipes()


class Pipes:
    """The pipes of one worker group: a part is the bytes themselves."""

    part_bytes = 4 << 20
    ahead = 3

    def packed(self, buffer: memoryview, taking: Taking, *, last: bool) -> bytes | str:
        return bytes(buffer)

    def wait(self, calls: list[Future[Any]]) -> None:
        wait(calls)

    def close(self) -> None:
        """Do nothing: parts are not stored anywhere."""

    def failure(self, error: Exception) -> str:
        return f"the values for this cell cannot be read ({getattr(error, 'strerror', None) or error})."


class SharedFolder(Pipes):
    """A hidden folder in the notebook's own: a part is the path of its file, which is removed when all hosts have read
    it. The last part goes through the pipes, as do parts for which there is no room in the folder.

    Whoever may write to the notebook's folder, such as a team, can move the hidden one away and put another in its
    place, and values are unpickled. So the hidden folder is held open, and its files have names that nobody else knows.
    """

    part_bytes = 8 << 20

    def __init__(self, folder: str) -> None:
        self._within = folder
        self._folder: Path | None = None
        self._fd = -1
        self._paths: deque[str] = deque()
        """Paths of the parts still being read; empty for parts in the pipes."""

    def packed(self, buffer: memoryview, taking: Taking, *, last: bool) -> bytes | str:
        path = "" if last else self._written(buffer)
        self._paths.append(path)
        return path or bytes(buffer)

    def _written(self, buffer: memoryview) -> str:
        """Write a part and return its path; empty if it cannot be written."""
        try:
            if self._folder is None:
                _sweep(self._within)
                self._folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=self._within))
                self._fd = _opened(self._folder)
            fd = os.open(name := secrets.token_hex(16), _NEW, 0o600, dir_fd=self._fd)
            with open(fd, "wb", buffering=0) as file:
                if os.fstat(fd).st_uid != os.fstat(self._fd).st_uid:
                    raise PermissionError(errno.EPERM, "somebody else's folder", str(self._folder))
                while buffer:
                    buffer = buffer[file.write(buffer) :]
        except OSError:
            return ""
        return str(self._folder / name)

    def wait(self, calls: list[Future[Any]]) -> None:
        wait(calls)
        if path := self._paths.popleft():
            os.unlink(os.path.basename(path), dir_fd=self._fd)

    def close(self) -> None:
        if self._folder is not None:
            _remove(self._folder, self._fd)


def _opened(folder: Path) -> int:
    """Open a folder that is closed to all other users. Raises `OSError`."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    if os.fstat(fd).st_mode & 0o777 == 0o700:
        return fd
    os.close(fd)
    raise PermissionError(errno.EPERM, "others may write there", str(folder))


def _remove(folder: Path, fd: int) -> None:
    """Remove such a folder, which is open, and the parts in it; nothing else, whatever may have taken its place."""
    with suppress(OSError):
        if fd >= 0:
            for name in os.listdir(fd):
                if _NAME.fullmatch(name):
                    os.unlink(name, dir_fd=fd)
            os.close(fd)
        folder.rmdir()


def _sweep(folder: str) -> None:
    """Remove the remains of killed coordinators."""
    for left in Path(folder).glob(f"{PREFIX}*"):
        with suppress(OSError):
            if time.time() - left.lstat().st_mtime > LEFT_S:
                _remove(left, _opened(left))
