"""What a rank was loading when it crashed: a few bytes of memory that agent and rank share, and that outlive the rank.

A crash while a variable is unpickled leaves no Python line of the user's; the name of the variable is what helps. The
rank notes it before each one, which costs a microsecond and no message; the agent reads it only when the rank has died.
"""

from __future__ import annotations

import os
import tempfile

SIZE_BYTES = 256


def create() -> int:
    """A descriptor for both sides."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("jupyter_distrib-loading", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def note(fd: int, name: str) -> None:
    """Called in the rank before a variable is loaded; with an empty name when all are."""
    os.pwrite(fd, name.encode()[:SIZE_BYTES].ljust(SIZE_BYTES, b"\0"), 0)


def read(fd: int) -> str:
    """The variable that was being loaded; empty if none was."""
    return os.pread(fd, SIZE_BYTES, 0).rstrip(b"\0").decode("utf-8", "ignore")
