"""An open checkpoint folder, and the owners of it and its files.

Whoever can put files where a checkpoint is read can put code into them, since pickles are code. So paths are not
trusted: files are opened relative to the open folder, and ownership is checked on the descriptor that is then read.

*This user* is the owner that the file system gives to a file created by this process. It differs from the process's own
user id if a file server maps users, or in a user namespace; and some file systems have no modes.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

from torch.distributed.checkpoint.filesystem import FileSystem

from jupyter_distrib.system import other_users

METADATA = ".metadata"
_MODE = 0o644
"""Mode of new files: nobody else may write into them, and so put code into them."""
_FOLDER_MODE = 0o755

Identity = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ThisUser:
    """The file system's report on a new file of this process."""

    uid: int
    has_modes: bool
    """Whether files keep the mode they were created with; if not, modes are meaningless."""


class CheckpointFolder(FileSystem):
    """An open folder, which the caller closes.

    Raises:
        OSError: There is no such folder.
    """

    def __init__(self, path: Path, *, follow: bool = True) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
        self.info = os.fstat(self.fd)

    @property
    def identity(self) -> Identity:
        """The numbers that distinguish this folder from another one put in its place."""
        return self.info.st_dev, self.info.st_ino

    def close(self) -> None:
        """Close the folder; may be called again."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    @cached_property
    def this_user(self) -> ThisUser:
        """This user as the owner of files here; the process's own user id if it cannot create any."""
        try:
            return self.created()
        except OSError:
            return ThisUser(uid=os.geteuid(), has_modes=True)

    def created(self) -> ThisUser:
        """Create a file, inspect it and remove it. Raises `OSError` if that is refused."""
        temporary = getattr(os, "O_TMPFILE", 0)
        name = f"{METADATA}.probe-{uuid4().hex}"
        try:
            if not temporary:
                raise OSError(errno.EOPNOTSUPP, "no files without a name")
            fd, name = os.open(".", os.O_RDWR | temporary | os.O_CLOEXEC, 0o600, dir_fd=self.fd), ""
        except OSError:  # not every file system has unnamed files
            fd = self._new(name, 0o600)
        try:
            info = os.fstat(fd)
        finally:
            os.close(fd)
            if name:
                os.unlink(name, dir_fd=self.fd)
        return ThisUser(uid=info.st_uid, has_modes=not info.st_mode & 0o077)

    def other_owner(self, info: os.stat_result) -> str:
        """Return the login name of an entry's owner; empty for this user."""
        return "" if info.st_uid == self.this_user.uid else other_users.login(info.st_uid)

    def doubt(self, fd: int) -> str:
        """Return why somebody other than this user and root may have written an open file or folder; empty if nobody
        can."""
        info = os.fstat(fd)
        if info.st_uid not in (0, os.geteuid()) and (owner := self.other_owner(info)):
            return f"belongs to {owner}"
        if (writers := other_users.writers(fd)) and self.this_user.has_modes:
            return f"can be written by {writers}"
        return ""

    # -------------------------------------------------------------------------------------------- files by name

    def new(self, name: str) -> IO[bytes]:
        """Return a new file. Raises `OSError` if anything has that name."""
        return os.fdopen(self._new(name, _MODE), "wb")

    def open_file(self, name: str, *, links: bool = True) -> tuple[IO[bytes], str]:
        """Return a file, and why somebody other than this user and root may have written it; empty if nobody can.
        `links`: whether to follow links.

        Raises:
            OSError: There is no such regular file.
        """
        doubt = "" if os.path.basename(name) == name else "is in another folder"
        try:
            fd = self._existing(name, os.O_NOFOLLOW)
        except OSError as error:
            if not links or error.errno not in (errno.ELOOP, errno.EMLINK):
                raise
            fd, doubt = self._existing(name, 0), "is a link"
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "this is not a file", name)
        if not doubt and (own := self.doubt(self.fd)):
            doubt = f"is in a folder that {own}"
        return os.fdopen(fd, "rb"), self.doubt(fd) or doubt

    def has(self, name: str) -> bool:
        """Return whether there is anything with this name."""
        try:
            os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def is_whole(self, name: str) -> bool:
        """Return whether a subfolder is a complete checkpoint."""
        try:
            return stat.S_ISREG(os.stat(f"{name}/{METADATA}", dir_fd=self.fd).st_mode)
        except OSError:
            return False

    def names(self) -> list[str]:
        return os.listdir(self.fd)

    def replace(self, old: str, new: str) -> None:
        os.replace(old, new, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def remove(self, name: str) -> None:
        """Remove a file, but not a folder, which only a stranger could have created here."""
        try:
            os.unlink(name, dir_fd=self.fd)
        except (FileNotFoundError, IsADirectoryError, PermissionError):
            pass

    def make_folder(self, name: str) -> None:
        """Create a subfolder that only this user can write into. Raises `OSError`, also if the name exists."""
        os.mkdir(name, _FOLDER_MODE, dir_fd=self.fd)

    def sync(self) -> None:
        os.fsync(self.fd)

    def _new(self, name: str, mode: int) -> int:
        return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=self.fd)

    def _existing(self, name: str, flag: int) -> int:
        # Not to wait for the other end, if somebody has put a pipe there.
        return os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flag, dir_fd=self.fd)

    # -------------------------------------------------------------------------------------------- as torch calls it

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Open a file of the folder, by the path that torch passes."""
        with self.new(self.name_of(path)) if "w" in mode else self.open_file(self.name_of(path))[0] as file:
            yield file

    def name_of(self, path: str | os.PathLike[str]) -> str:
        return os.path.relpath(path, self.path)


def make_folder(path: Path) -> None:
    """Create a folder that only this user can write into. Raises `OSError`, also if the name exists."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path.parent)) from None
    path.mkdir(mode=_FOLDER_MODE)
