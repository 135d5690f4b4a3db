"""Notes that a rank leaves for its agent in memory that both share, and that outlives the rank: the variable that it is
loading, why it ends, and the place of its main thread.

A crash while a variable is unpickled leaves no Python line of the user's; the name of the variable is what helps. The
rank notes the name before each one, which costs a microsecond and no message; the agent reads it only if the rank has
died.

A rank in which C code holds Python's lock can answer nobody. On a signal, Python's faulthandler still writes where its
main thread is, without the lock, behind the first `PLACE_AT` bytes.

A cell may close any descriptor, and what it opens then gets the number. So the rank maps the notes into its memory.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import tempfile

SIZE_BYTES = 256
CAUSE_BYTES = 512
PLACE_AT = SIZE_BYTES + CAUSE_BYTES
"""The name of the variable, the cause of the end, and behind them the place."""
NO_DEVICE = "The GPU cannot be used: "
"""Begins the line that a rank writes if it cannot take its GPU; the reason follows."""
PLACE_SIGNAL: int | None = getattr(signal, "SIGRTMIN", None) and signal.SIGRTMIN + 10
"""Signal that nobody else uses; None where the system has no such signals."""


def create() -> int:
    """Return a new descriptor for both sides."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("jupyter_distrib-loading", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, PLACE_AT)
    return fd


class Notes:
    """The notes, in the memory of the rank."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, PLACE_AT)

    def loading(self, name: str) -> None:
        """Note the variable that is about to be loaded; an empty name after the last."""
        self._memory[:SIZE_BYTES] = name.encode()[:SIZE_BYTES].ljust(SIZE_BYTES, b"\0")

    def cause(self, text: str) -> None:
        """Note why this rank ends, to follow `because`."""
        self._memory[SIZE_BYTES:PLACE_AT] = text.encode()[:CAUSE_BYTES].ljust(CAUSE_BYTES, b"\0")


def read(fd: int) -> tuple[str, str]:
    """Return the variable that was being loaded, and why the rank has ended; empty without such a note."""
    loading, cause = os.pread(fd, SIZE_BYTES, 0), os.pread(fd, CAUSE_BYTES, SIZE_BYTES)
    return loading.rstrip(b"\0").decode("utf-8", "ignore"), cause.rstrip(b"\0").decode("utf-8", "ignore")


def write_place_on_signal(fd: int) -> None:
    """Install a signal handler that makes the rank write its place. Called once, in the rank."""
    if PLACE_SIGNAL is not None:
        faulthandler.register(PLACE_SIGNAL, file=fd, all_threads=False)


def clear_place(fd: int) -> None:
    """Clear the last place. Called in the agent before it sends the signal; both sides share the position in the
    file."""
    os.ftruncate(fd, PLACE_AT)
    os.lseek(fd, PLACE_AT, os.SEEK_SET)


def place(fd: int) -> str:
    """Return the frames that faulthandler has written since then, innermost first; empty if there are none yet."""
    return os.pread(fd, 1 << 16, PLACE_AT).decode("utf-8", "replace")
