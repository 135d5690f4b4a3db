"""Lets ranks on the kernel's machine map the files that the notebook has mapped to read, as `np.memmap(..., mode="r")`
and `np.load(..., mmap_mode="r")` do, instead of getting a copy. A training set in such a file is often larger than the
memory.

The system says which part of which file lies at an address (proc_pid_maps(5)): an array knows only the path, where
another file may be by now. Without /proc the array is copied. numpy is never imported to pickle.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

from jupyter_distrib.serialization import shared_arrays

LEAST_BYTES = 1 << 20
"""Size below which an array is copied: that takes less time than mapping."""
_MAPS = "/proc/self/maps"


def form(array: Any, reads_files: Callable[[], bool]) -> Any:
    """Return the form of an array of numpy's class `memmap` if the ranks can map its file; else NotImplemented."""
    begin, end = shared_arrays.bounds(array)
    if array.mode != "r" or end - begin < LEAST_BYTES or not reads_files() or (found := _file_at(begin, end)) is None:
        return NotImplemented
    path, identity, position = found
    view = array.__array_interface__["data"][0] - begin, array.shape, array.strides, array.dtype
    return mapped, (path, identity, position, end - begin, view)


def _file_at(begin: int, end: int) -> tuple[str, tuple[int, int], int] | None:
    """Return path, device and inode, and position in the file of what is mapped at these addresses; None if that is no
    file, or one that no path leads to any more, whose name has ` (deleted)` behind it."""
    try:
        with open(_MAPS, encoding="utf-8", errors="surrogateescape") as maps:
            for line in maps:
                addresses, _, offset, _, _, *path = line.rstrip("\n").split(maxsplit=5)
                first, last = (int(address, 16) for address in addresses.split("-"))
                if not first <= begin < last:
                    continue
                state, position = os.stat(path[0]), int(offset, 16) + begin - first
                is_whole = end <= last and position + end - begin <= state.st_size
                return (path[0], (state.st_dev, state.st_ino), position) if is_whole else None
    except (OSError, ValueError, IndexError):
        pass
    return None


# ------------------------------------------------------------------------------------------- named by the pickles


def mapped(
    path: str, identity: tuple[int, int], position: int, size_bytes: int, view: tuple[int, Any, Any, Any]
) -> Any:
    """Return an array over a part of a file, as the notebook has it.

    Raises:
        FileNotFoundError: The file is gone, or another one is in its place.
    """
    numpy: Any = importlib.import_module("numpy")
    with open(path, "rb") as file:
        state = os.fstat(file.fileno())
        if (state.st_dev, state.st_ino) != identity:
            raise FileNotFoundError(f"{path} has been replaced since the cell was sent")
        whole = numpy.memmap(file, numpy.uint8, "r", position, (size_bytes,))
    offset, shape, strides, dtype = view
    first = whole[offset : offset + dtype.itemsize].view(dtype)
    return numpy.lib.stride_tricks.as_strided(first, shape, strides, subok=True, writeable=False)
