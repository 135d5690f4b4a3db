"""Lets numpy arrays that overlap in memory, with one another or with a tensor, do so again where they are unpickled.

numpy pickles each array by itself. So a first pickling only records where its arrays and storages lie; if some of them
overlap, a second one sends the memory from the first byte to the last once, and arrays and storages as places in it.
Memory of which the arrays use less than half stays apart: columns of a matrix lie between one another, and share
nothing. Pickles name the functions below.

numpy is never imported to pickle: without it in `sys.modules` there are no arrays. In the thread that pickles.
"""

from __future__ import annotations

import ctypes
import importlib
import pickle
import sys
from typing import Any

_SMALL_BYTES = 1 << 20
"""Largest memory of which it does not matter how much is used."""


class Region:
    """Memory that several arrays and storages use, from its first byte to its last."""

    def __init__(self, begin: int, end: int, owners: list[Any]) -> None:
        self.begin, self.end = begin, end
        self._owners = owners
        """The arrays and storages, which keep the memory."""

    def __reduce__(self) -> tuple[Any, ...]:
        memory: Any = (ctypes.c_ubyte * (self.end - self.begin)).from_address(self.begin)
        memory.owners = self._owners
        return writable, (pickle.PickleBuffer(memory),)


class SharedArrays:
    """The memory of the arrays and storages in one pickling."""

    def __init__(self, regions: dict[int, Region] | None = None) -> None:
        """Prepare for one pickling; `regions` is what `overlapping` has found in an earlier one of the same value."""
        numpy = sys.modules.get("numpy")
        self._numpy: Any = numpy if hasattr(numpy, "ndarray") else None
        self._alone: dict[int, Any] = {}
        self._regions = regions or {}
        self.seen: list[tuple[int, int, int, bool, Any]] = []
        """Begin, end, bytes used, whether it is an array, and the object."""

    def reduce(self, obj: Any) -> Any:
        """Return the form of an array in a region; NotImplemented for everything else."""
        if id(obj) in self._alone:
            return NotImplemented
        if self._numpy is None or type(obj) not in (self._numpy.ndarray, self._numpy.memmap) or obj.dtype.hasobject:
            return NotImplemented
        begin, end = bounds(obj)
        if begin == end:
            return NotImplemented
        region = self._region(begin, end)
        if region is None:
            self.seen.append((begin, end, min(obj.nbytes, end - begin), True, obj))
            return NotImplemented
        offset = obj.__array_interface__["data"][0] - region.begin
        if type(obj) is self._numpy.memmap:
            return mapped_in, (region, offset, obj.shape, obj.strides, obj.dtype)
        form = array_in if obj.flags.writeable else read_only_in
        return form, (region, offset, obj.shape, obj.strides, obj.dtype)

    def alone(self, array: Any) -> Any:
        """Return an array that was made for the pickle; it does not count as a second one over its memory."""
        self._alone[id(array)] = array
        return array

    def reduce_storage(self, storage: Any) -> Any:
        """Return the form of a CPU storage in a region, NotImplemented for others."""
        begin, size_bytes = storage.data_ptr(), storage.nbytes()
        region = self._region(begin, begin + size_bytes)
        if region is None:
            self.seen.append((begin, begin + size_bytes, size_bytes, False, storage))
            return NotImplemented
        return storage_in, (region, begin - region.begin, size_bytes)

    def _region(self, begin: int, end: int) -> Region | None:
        region = self._regions.get(begin)
        return region if region is not None and end <= region.end else None

    def overlapping(self) -> dict[int, Region]:
        """Return the memory that an array shares with an array or storage, by the address of each of these."""
        found: dict[int, Region] = {}
        group: list[tuple[int, int, int, bool, Any]] = []
        group_end = 0
        for each in sorted(self.seen, key=lambda each: each[:2]):
            if each[0] >= group_end:
                found |= _shared_by(group, group_end)
                group = []
            group.append(each)
            group_end = max(group_end, each[1])
        return found | _shared_by(group, group_end)


def _shared_by(group: list[tuple[int, int, int, bool, Any]], end: int) -> dict[int, Region]:
    """Return the memory of arrays and storages that overlap, by the address of each; none if it is not worth it."""
    if len(group) < 2 or not any(is_array for *_, is_array, _ in group):
        return {}
    begin, used = group[0][0], sum(used for _, _, used, *_ in group)
    if end - begin > max(2 * used, _SMALL_BYTES):
        return {}
    region = Region(begin, end, [owner for *_, owner in group])
    return {address: region for address, *_ in group}


def bounds(array: Any) -> tuple[int, int]:
    """Return the addresses of an array's first byte and of the one behind its last."""
    begin = end = array.__array_interface__["data"][0]
    if array.size == 0:
        return begin, begin
    for length, stride in zip(array.shape, array.strides, strict=True):
        if stride < 0:
            begin += (length - 1) * stride
        else:
            end += (length - 1) * stride
    return begin, end + array.itemsize


# ------------------------------------------------------------------------------------------- named by the pickles


def writable(buffer: Any) -> Any:
    return buffer


def array_in(region: Any, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any) -> Any:
    return importlib.import_module("numpy").ndarray(shape, dtype, region, offset, strides)


def read_only_in(*place: Any) -> Any:
    array = array_in(*place)
    array.flags.writeable = False
    return array


def mapped_in(*place: Any) -> Any:
    """Return an array as numpy itself unpickles a mapped one: of its class, without a file, and writable."""
    return array_in(*place).view(importlib.import_module("numpy").memmap)


def storage_in(region: Any, offset: int, size_bytes: int) -> Any:
    torch: Any = importlib.import_module("torch")
    return torch.frombuffer(region, dtype=torch.uint8, count=size_bytes, offset=offset).untyped_storage()
