"""The log of one rank in one run: complete, or truncated in the middle. In the thread of whoever writes it."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

from jupyter_distrib.system import formatting, log_folder

LIMIT_BYTES = log_folder.chosen_bytes(log_folder.LIMIT_VARIABLE) or 1 << 30
TAIL_BYTES = 16 << 10
"""Number of bytes kept from the end of the output when a log is truncated."""


class LogFile:
    """One log, which is open and locked from the first byte until `close`, and is opened again for what comes later.

    Args:
        path: Its place in the folder of its run, which is in that of all runs.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._all = path, log_folder.of(path.parent.parent)
        self._fd = -1
        self._size = 0
        self._is_lost = False
        """Whether the log can no longer be written."""
        self._tail: bytearray | None = None
        """The end of the output of a truncated log; None as long as it is complete."""
        self._is_tail_new = False

    def write(self, data: bytes) -> str:
        """Write to the log. Return a sentence for the user if it cannot be written or is truncated here; else empty."""
        if self._is_lost:
            return ""
        try:
            if self._fd < 0:
                self._open()
        except OSError as error:
            self._is_lost = True
            return f"the log cannot be written: {error}"
        try:
            return self._write(data)
        except OSError as error:
            return self._give_up(error)

    def flush(self) -> None:
        """Write the current end of the output to a truncated log."""
        if self._tail is None or not self._is_tail_new or self._fd < 0:
            return
        self._is_tail_new = False
        with suppress(OSError):
            os.ftruncate(self._fd, self._size)
            _write_all(self._fd, self._tail)

    def close(self) -> None:
        """Close the log at the end of its run."""
        self.flush()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> None:
        self._all.make(self._path.parent)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        self._fd = os.open(self._path, flags, 0o600)
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            os.close(self._fd)
            self._fd = -1
            raise OSError(errno.EPERM, "it is not a regular file", str(self._path))
        log_folder.hold(self._fd)
        info = os.fstat(self._fd)
        if not info.st_nlink:  # another process removed it before it was locked
            os.close(self._fd)
            return self._open()
        if self._tail is None:
            self._size = info.st_size
        return None

    def _write(self, data: bytes) -> str:
        if self._tail is not None:
            self._add_to_tail(data)
            return ""
        if self._size + len(data) > LIMIT_BYTES:
            return self._cut(data, f"it has reached {formatting.size(LIMIT_BYTES)}")
        if not self._all.has_room(len(data), self._size):
            return self._cut(data, self._all.full)
        _write_all(self._fd, data)
        self._size += len(data)
        return ""

    def _cut(self, data: bytes, reason: str) -> str:
        """Truncate the log: from now on keep only the end of the output."""
        mark = f"\n[log truncated here: {reason}; the end of the output follows]\n".encode()
        _write_all(self._fd, mark)
        self._size += len(mark)
        self._tail = bytearray()
        self._add_to_tail(data)
        return f"the log of {self._path.stem.replace('rank', 'rank ')} is truncated: {reason}"

    def _add_to_tail(self, data: bytes) -> None:
        assert self._tail is not None
        self._tail += data
        del self._tail[:-TAIL_BYTES]
        self._is_tail_new = True

    def _give_up(self, error: OSError) -> str:
        """Log no more, because the run matters more than its log, and report where the log is cut off. It stays open
        and locked until `close`."""
        self._is_lost = True
        with suppress(OSError):
            os.write(self._fd, b"\n[log truncated here]\n")
        return f"the log of {self._path.stem.replace('rank', 'rank ')} is truncated: {error}"


def _write_all(fd: int, data: bytes | bytearray) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
