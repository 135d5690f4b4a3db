"""Finds out whether the files of a checkpoint are as they were written: all there, not cut off, and with the same bits,
by the checksums that `torch.save` puts into its zip archives and `torch.load` (2.13) does not look at. `.metadata` has
to name a place for every number: torch (2.13) returns what was in memory before for those without one."""

from __future__ import annotations

import io
import math
import os
import struct
import zipfile
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from jupyter_distrib.checkpoints.place import METADATA, CheckpointFolder

_BLOCK_BYTES = 1 << 18
_UNREADABLE = (zipfile.BadZipFile, RuntimeError, ValueError, EOFError)
"""The exceptions of `zipfile` for an archive with changed bits."""


class DamagedError(Exception):
    """A file of a checkpoint is not as it was written; the message names the file."""


def check_files(folder: CheckpointFolder, stored: Mapping[Any, Any]) -> None:
    """Check that the files are as long as `.metadata` says, and that no two entries have the same bytes; this reads
    none of them.

    Raises:
        DamagedError: One is missing or too short, or entries overlap.
    """
    ends: Counter[str] = Counter()
    taken: Counter[str] = Counter()
    for each in stored.values():
        ends[each.relative_path] = max(ends[each.relative_path], each.offset + each.length)
        taken[each.relative_path] += each.length
    for name, end in ends.items():
        try:
            size = os.stat(name, dir_fd=folder.fd).st_size
        except FileNotFoundError:
            raise DamagedError(f"{folder.path}/{name} is missing") from None
        if size < end:
            raise DamagedError(f"{folder.path}/{name} is cut off: it has {size:,} of {end:,} bytes")
        if size < taken[name]:
            raise DamagedError(f"{folder.path}/{METADATA} gives several entries the same bytes of {name}")


def check_places(folder: CheckpointFolder, metadata: Metadata) -> None:
    """Check that there is a place in a file for each entry, and for each number of a tensor.

    Raises:
        DamagedError: There is none.
    """
    path, stored = folder.path / METADATA, metadata.storage_data or {}
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            if MetadataIndex(name) not in stored:
                raise DamagedError(f"{path} has no place for `{name}`")
            continue
        numbers = 0
        for chunk in entry.chunks:
            place = stored.get(MetadataIndex(name, chunk.offsets))
            ends = [start + length for start, length in zip(chunk.offsets, chunk.sizes, strict=True)]
            if place is None or any(end > size for end, size in zip(ends, entry.size, strict=True)):
                raise DamagedError(f"{path} has no place for a part of `{name}`")
            count = math.prod(chunk.sizes)
            if place.length < count * entry.properties.dtype.itemsize and not _is_transformed(place):
                raise DamagedError(f"{path} has {place.length:,} bytes for {count:,} numbers of `{name}`")
            numbers += count
        if numbers != (wanted := math.prod(entry.size)):
            raise DamagedError(f"{path} has places for {numbers:,} of {wanted:,} numbers of `{name}`")


def _is_transformed(place: Any) -> bool:
    """Return whether an extension of torch, such as one that compresses, has written this entry."""
    return bool(getattr(place, "transform_descriptors", None))


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
    except _UNREADABLE as error:
        raise DamagedError(f"it is not as it was written ({error})") from None
    entry.seek(0)


_HEADER_BYTES = 30
"""Size of the fixed part of the header before each part of a zip archive; the lengths of its name and of its extra
field are the last of it."""


def rewritten(content: bytes) -> bytes:
    """Return an archive of `torch.save` with the same parts, built anew, so that torch reads what was checked here. An
    archive of a few kilobytes can hold gigabytes if its parts are compressed, or share their bytes.

    Raises:
        DamagedError: It is not as `torch.save` writes it, or a bit in it has changed.
    """
    made = io.BytesIO()
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            parts = archive.infolist()
    except _UNREADABLE as error:
        raise DamagedError(f"it is not as it was written ({error})") from None
    if any(part.compress_type != zipfile.ZIP_STORED or part.compress_size != part.file_size for part in parts):
        raise DamagedError("a part of it is compressed, which torch.save does not do")
    if sum(part.file_size for part in parts) > len(content) or len({part.filename for part in parts}) < len(parts):
        raise DamagedError("parts of it overlap")
    check_sums(io.BytesIO(content))
    with zipfile.ZipFile(made, "w") as copy:
        for part in parts:
            lengths = struct.unpack_from("<HH", content, part.header_offset + _HEADER_BYTES - 4)
            start = part.header_offset + _HEADER_BYTES + sum(lengths)
            copy.writestr(part.filename, memoryview(content)[start : start + part.file_size])
    return made.getvalue()


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
