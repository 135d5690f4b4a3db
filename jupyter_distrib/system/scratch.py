"""Folders for temporary files that other programs write by name, for which unnamed files are not enough.

A killed process leaves its folder behind. The lock in it ends with the process, whatever container it was in, so agents
remove unlocked folders when a rank has ended and when they start.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

PREFIX = "jd-tmp-"
"""Short: sockets are made in such folders, and their paths are limited."""
SHORT = "/tmp"  # noqa: S108 - what is made in it is private
"""The folder for temporary folders whose paths must be short."""
MADE_S = 60.0
"""Seconds after which a folder without a lock is no longer being created."""
_LOCK = ".jupyter_distrib"


@contextmanager
def folder(within: str | None = None) -> Iterator[Path]:
    """Provide a new folder private to this user, which is removed after the block; `within`: a folder to use instead
    of the one for temporary files."""
    with ExitStack() as stack:
        while True:
            made = Path(tempfile.mkdtemp(prefix=PREFIX, dir=within))
            stack.callback(_remove, made)
            held = stack.enter_context(_opened(made / _LOCK))
            with suppress(OSError):  # not every file system has locks
                fcntl.flock(held, fcntl.LOCK_EX)
            if (made / _LOCK).exists():  # else another process took it for a leftover
                break
        yield made


def sweep(*within: str) -> None:
    """Remove the remains of killed processes in the folders for temporary files, and in these folders."""
    for each in {tempfile.gettempdir(), SHORT, *within}:
        with suppress(OSError), os.scandir(each) as entries:
            for entry in entries:
                if entry.name.startswith(PREFIX) and entry.is_dir(follow_symlinks=False) and _is_ours(entry):
                    _remove_if_left(Path(entry.path))


def _is_ours(entry: os.DirEntry[str]) -> bool:
    return entry.stat(follow_symlinks=False).st_uid == os.getuid()


def _remove_if_left(path: Path) -> None:
    with suppress(OSError):
        try:
            held = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            if time.time() - path.stat().st_mtime > MADE_S:
                path.rmdir()  # only if it is empty
            return
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(path)
        finally:
            os.close(held)


def _remove(path: Path) -> None:
    """Remove a folder, its lock last: if something in it cannot be removed now, the next sweep finds it again."""
    with suppress(OSError):
        for each in path.iterdir():
            if each.name == _LOCK:
                continue
            if each.is_dir() and not each.is_symlink():
                shutil.rmtree(each, ignore_errors=True)
            else:
                each.unlink()
        if os.listdir(path) == [_LOCK]:
            (path / _LOCK).unlink()
        path.rmdir()


def _opened(path: Path) -> BinaryIO:
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "r+b")
