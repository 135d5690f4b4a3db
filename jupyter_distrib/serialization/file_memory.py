"""Reads buffers that may be mapped from a file which somebody truncates: a program that touches memory beyond the
end of its file is killed (SIGBUS), while a system call that copies the memory only reports an error.

Any process, any thread.
"""

from __future__ import annotations

import bisect
import ctypes
import importlib
import mmap
import os
from typing import Any

from jupyter_distrib.serialization import content_hash

STEP_BYTES = 1 << 20
_SEALED = "/memfd:jupyter_distrib"
"""The beginning of the name of our own memory, which nobody can truncate."""


class FileMemory:
    """The addresses of this process that are mapped from files."""

    def __init__(self, areas: list[tuple[int, int]]) -> None:
        self._areas = areas
        """Begin and end of each address range, in order."""

    @classmethod
    def now(cls) -> FileMemory:
        areas = []
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
            for line in file:
                where, _, _, _, inode, *name = line.split(None, 5)
                if inode != "0" and not "".join(name).startswith(_SEALED):
                    begin, end = where.split("-")
                    areas.append((int(begin, 16), int(end, 16)))
        return cls(areas)

    def holds(self, view: memoryview) -> bool:
        """Return whether any part of a buffer is mapped from a file."""
        begin = address_of(view)
        number = bisect.bisect_left(self._areas, (begin + view.nbytes, 0))
        return number > 0 and self._areas[number - 1][1] > begin


def digest_of_file_memory(view: memoryview, seed: int) -> bytes:
    """Return the hash of a buffer that is mapped from a file. Raises `OSError` if the file has become too short."""

    def hash_part(start: int, size_bytes: int, hasher: Any) -> None:
        fd = os.memfd_create("jupyter_distrib", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, STEP_BYTES)
            with mmap.mmap(fd, STEP_BYTES) as copied, memoryview(copied) as window:
                for at in range(start, start + size_bytes, STEP_BYTES):
                    wanted = min(STEP_BYTES, start + size_bytes - at)
                    if os.pwrite(fd, view[at : at + wanted], 0) < wanted:
                        raise OSError("the file of a buffer is too short")
                    with window[:wanted] as part:
                        hasher.update(part)
        finally:
            os.close(fd)

    return content_hash.digest_of(view.nbytes, seed, hash_part)


def address_of(view: memoryview) -> int:
    """Return the address of a buffer, which may be read-only."""
    if isinstance(view.obj, bytes):
        return id(view.obj)
    if isinstance(view.obj, ctypes.Array):  # a tensor's memory
        return ctypes.addressof(view.obj)
    numpy = importlib.import_module("numpy")
    return int(numpy.frombuffer(view, numpy.uint8).__array_interface__["data"][0])
