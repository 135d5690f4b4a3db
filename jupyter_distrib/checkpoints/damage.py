"""Finds out whether the files of a checkpoint are as they were written: all there, not cut off, and with the same bits,
by the checksums that `torch.save` puts into its zip archives and `torch.load` (2.13) does not look at."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Mapping
from typing import Any

from jupyter_distrib.checkpoints.place import CheckpointFolder

_BLOCK_BYTES = 1 << 18


class DamagedError(Exception):
    """A file of a checkpoint is not as it was written; the message names the file."""


def check_files(folder: CheckpointFolder, stored: Mapping[Any, Any]) -> None:
    """Check that the files are as long as `.metadata` says; this reads none of them.

    Raises:
        DamagedError: One is missing or too short.
    """
    ends: dict[str, int] = {}
    for each in stored.values():
        ends[each.relative_path] = max(ends.get(each.relative_path, 0), each.offset + each.length)
    for name, end in ends.items():
        try:
            size = os.stat(name, dir_fd=folder.fd).st_size
        except FileNotFoundError:
            raise DamagedError(f"{folder.path}/{name} is missing") from None
        if size < end:
            raise DamagedError(f"{folder.path}/{name} is cut off: it has {size:,} of {end:,} bytes")


def check_sums(entry: Any) -> None:
    """Check the checksums in an entry, a stream at its beginning that ends there again.

    Raises:
        DamagedError: A bit is not as it was written.
    """
    try:
        with zipfile.ZipFile(_View(entry)) as archive:
            for part in filter(lambda part: part.CRC, archive.infolist()):  # 0: written without
                with archive.open(part) as content:
                    while content.read(_BLOCK_BYTES):
                        pass
    except (zipfile.BadZipFile, NotImplementedError, EOFError) as error:
        raise DamagedError(f"it is not as it was written ({error})") from None
    entry.seek(0)


class _View(io.RawIOBase):
    """A stream for `zipfile`, which seeks from the end; torch's streams (2.13) take that offset for a positive one."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        stream.seek(0, os.SEEK_END)
        self._bytes: int = stream.tell()

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return int(self._stream.tell())

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._stream.seek(offset + (0, self.tell(), self._bytes)[whence])
        return self.tell()

    def read(self, size: int = -1) -> bytes:
        return bytes(self._stream.read(size))
