"""Reads another user's `.metadata` without running code: the pickle may name only the classes that
`torch.distributed.checkpoint` puts into it. It gets stand-ins for them that hold the pickled fields; the real objects
are built from the fields that pass the checks.

A pickle that names nothing can still keep this process busy for ever, or end it. A few bytes make a tuple that holds
another tuple twice, which again holds one twice, and so on: its hash would take longer than the age of the universe.
In C the hash of a tuple calls the hash of the tuple inside, so a million nested tuples overflow the stack. Neither
can be interrupted, and no error is raised. A `bytearray` of a number takes as much memory as that says. So
`check_extent` first follows the operations, with the depth and the size of each value in place of the value.
"""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from jupyter_distrib.checkpoints.checks import checked_path, count, number_type, refuse, shape, text
from jupyter_distrib.system.private_torch import CALLS_ANOTHER, LAYOUT, MEMORY_FORMAT, STORAGE_INFO
from jupyter_distrib.worker.pytorch.private import storage_info

_MODULE = "torch.distributed.checkpoint.metadata"
_HELD = {
    (_MODULE, "Metadata"), (_MODULE, "TensorStorageMetadata"), (_MODULE, "BytesStorageMetadata"),
    (_MODULE, "MetadataIndex"), (_MODULE, "ChunkStorageMetadata"), (_MODULE, "TensorProperties"),
    (_MODULE, "StorageMeta"), STORAGE_INFO,
}  # fmt: skip
_IS_PATH = re.compile(r"pathlib(\._local)?\.(Posix|Windows)Path")


def metadata_from(content: bytes) -> Metadata:
    """Return the metadata of a checkpoint from a stranger's pickle.

    Raises:
        pickle.UnpicklingError: It names something that the description of a checkpoint does not need. ValueError: It
        contains something that does not belong there. Exception: It is damaged.
    """
    check_extent(content, names_as_keys=True)
    found = _fields(_Unpickler(io.BytesIO(content)).load(), "Metadata")
    entries = _dict(found["state_dict_metadata"])
    paths = found.get("planner_data")
    return Metadata(
        state_dict_metadata={_shown(name): _entry(value) for name, value in entries.items()},
        planner_data=paths and {_shown(name): _shown_path(path) for name, path in _dict(paths).items()},
        storage_data={_index(key): _stored(value) for key, value in _dict(found["storage_data"]).items()},
        storage_meta=_storage_meta(found.get("storage_meta")),
    )


def _storage_meta(value: object) -> StorageMeta:
    fields = {} if value is None else _fields(value, "StorageMeta")
    return StorageMeta(modules=[_shown(each) for each in _list(fields.get("modules", []))])


def _shown(name: object) -> str:
    """Return a name that is safe to show in messages, without line breaks and terminal codes."""
    if not text(name).isprintable():
        refuse("a name without control characters", name)
    return str(name)


def _shown_path(value: object) -> tuple[str | int, ...]:
    path = checked_path(value)
    for each in path:
        _shown(str(each))
    return path


class _Described:
    """Stands in for an object of this class, with its pickled fields."""

    fields: object = None

    def __setstate__(self, fields: object) -> None:
        self.fields = fields


class _Unpickler(pickle.Unpickler):
    """Unpickles with stand-ins for a few classes, and refuses all others."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        # New for each pickle, since a pickle can also change a class that it names.
        self._made: dict[tuple[str, str], Any] = {key: type(key[1], (_Described,), {}) for key in _HELD}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._made:
            return self._made[module, name]
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        # Functions of this call alone, for the same reason.
        as_is: dict[str, Callable[..., Any]] = {
            "torch.Size": lambda *given: shape(*given),  # noqa: PLW0108
            MEMORY_FORMAT: lambda number: count(number),  # noqa: PLW0108
            LAYOUT: lambda layout: text(layout),  # noqa: PLW0108
            # Python 3.11.2 and its like pickle members of an enum, such as memory formats, in this way.
            "builtins.getattr": lambda _, member: text(member),
        }
        if (full := f"{module}.{name}") in as_is:
            return as_is[full]
        if _IS_PATH.fullmatch(full):
            return lambda *parts: PurePosixPath(*parts)  # noqa: PLW0108
        raise pickle.UnpicklingError(f"it names {full!r:.200}, which the description of a checkpoint does not need")


def _fields(value: object, name: str) -> dict[str, Any]:
    if (
        not isinstance(value, _Described)
        or type(value).__name__ != name
        or not isinstance(value.fields, (dict, type(None)))
    ):
        refuse(f"a {name}", value)
    return value.fields or {}


def _entry(value: object) -> TensorStorageMetadata | BytesStorageMetadata:
    if type(value).__name__ == "BytesStorageMetadata":
        _fields(value, "BytesStorageMetadata")
        return BytesStorageMetadata()
    found = _fields(value, "TensorStorageMetadata")
    size, properties = shape(found["size"]), found["properties"]
    if not (isinstance(properties, _Described) and isinstance(properties.fields, tuple) and properties.fields):
        refuse("properties of a tensor", properties)
    chunks = [_chunk(each, len(size)) for each in _list(found["chunks"])]
    return TensorStorageMetadata(TensorProperties(dtype=number_type(properties.fields[0])), size, chunks)


def _chunk(value: object, dimensions: int) -> ChunkStorageMetadata:
    found = _fields(value, "ChunkStorageMetadata")
    offsets, sizes = shape(found["offsets"]), shape(found["sizes"])
    if not len(offsets) == len(sizes) == dimensions:
        refuse(f"a chunk of {dimensions} dimensions", (offsets, sizes))
    return ChunkStorageMetadata(offsets, sizes)


def _index(value: object) -> MetadataIndex:
    found = _fields(value, "MetadataIndex")
    offset, index = found.get("offset"), found.get("index")
    return MetadataIndex(
        _shown(found["fqn"]), None if offset is None else shape(offset), None if index is None else count(index)
    )


def _stored(value: object) -> Any:
    found = _fields(value, STORAGE_INFO[1])
    name = text(found["relative_path"])
    if os.path.basename(name) != name or name in {"", ".", ".."}:
        refuse("the name of a file in the folder", name)
    if found.get("transform_descriptors"):
        refuse("an entry as torch writes it", found["transform_descriptors"])
    return storage_info()(relative_path=name, offset=count(found["offset"]), length=count(found["length"]))


def _dict(value: object) -> dict[Any, Any]:
    if not isinstance(value, dict):
        refuse("a dict", value)
    return value


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        refuse("a list", value)
    return value


_MOST_LEVELS = 200
_MOST_PARTS = 10**9
"""Maximum number of parts of all values together; a part referenced several times counts as often."""
_KEEPS = {"MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"}
_NAMES = {"GET", "BINGET", "LONG_BINGET"}
_CALLS = {"REDUCE", "NEWOBJ", "NEWOBJ_EX", "OBJ"}
_TUPLES = {"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"}
_STRINGS = ("STRING", "UNICODE", "UNICODE8")
_ADDS = {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"}

_MAKE_ANY_SIZE = ("Tensor", "Storage", "Parameter")
"""Ends of the names of the classes that torch loads without running code, and that make an object as large as a number
says. What people save calls functions that rebuild them from the bytes of the file."""


@dataclass(slots=True)
class _Extent:
    """Facts about one value, updated in place."""

    name: str
    """The name of a class or function, or of the first part of a tuple."""
    is_name: bool
    """Whether it is a string or an object, of which nobody can predict or choose the hash."""
    has_number: bool
    """Whether it is a whole number, or was made of one."""
    levels: int = 0
    parts: int = 1


def check_extent(content: bytes, *, names_as_keys: bool = False) -> None:
    """Refuse a pickle whose values are too deep or too large.

    Args:
        content: The pickle.
        names_as_keys: Whether to refuse keys other than strings and objects: `pickle` would compare each tuple or
            number with all before it that have the same hash, which are easy to find, and cannot be interrupted.

    Raises:
        pickle.UnpicklingError: They are.
        ValueError: It is not a pickle.
    """
    stack: list[_Extent | None] = []  # None: a mark
    memo: dict[Any, _Extent | None] = {}
    parts = 0
    try:
        for operation, argument, _ in pickletools.genops(content):
            name = operation.name
            if name in _KEEPS:
                memo[len(memo) if name == "MEMOIZE" else argument] = stack[-1]
                continue
            if name == "MARK":
                stack.append(None)
                continue
            if name in _NAMES or name == "DUP":
                extent, more = memo[argument] if name in _NAMES else stack[-1], 0
            else:
                extent, more = _extent_of(operation, argument, stack, names_as_keys=names_as_keys)
            if operation.stack_after:
                stack.append(extent)
            parts += more or (extent.parts if extent else 0)
            if parts > _MOST_PARTS or (extent and extent.levels > _MOST_LEVELS):
                raise pickle.UnpicklingError("it has more values within one another than can be read")
    except (AttributeError, IndexError, KeyError, TypeError):
        raise pickle.UnpicklingError("it is damaged") from None


def _extent_of(
    operation: pickletools.OpcodeInfo, argument: object, stack: list[_Extent | None], *, names_as_keys: bool
) -> tuple[_Extent, int]:
    """Pop the operands of an operation from the stack. Return the extent of its result, and by how much that has
    grown."""
    taken: list[Any] = []
    wanted = operation.stack_before
    if pickletools.markobject in wanted:
        while (top := stack.pop()) is not None:
            taken.append(top)
        wanted = wanted[: wanted.index(pickletools.markobject)]
    taken += [stack.pop() for _ in wanted]
    into = taken.pop() if operation.name in _ADDS else _new_extent(operation, argument, taken)
    if names_as_keys and not all(each.is_name for each in _keys(operation, taken)):
        raise pickle.UnpicklingError("it has keys other than names")
    more = sum(each.parts for each in taken)
    into.levels = max([into.levels, *(each.levels + 1 for each in taken)])
    into.parts += more
    into.has_number = into.has_number or any(each.has_number for each in taken)
    if operation.name in _CALLS:
        _check_call(taken[-1].name, taken[-2].name if len(taken) > 1 else "", has_number=into.has_number)
    return into, more


def _new_extent(operation: pickletools.OpcodeInfo, argument: object, taken: list[_Extent]) -> _Extent:
    name = ""
    if operation.name in _TUPLES:
        name = taken[-1].name if taken else ""
    elif operation.name == "GLOBAL":
        name = str(argument).replace(" ", ".", 1)
    is_name = operation.name == "NEWOBJ" or operation.name.endswith(_STRINGS)
    return _Extent(name, is_name, has_number=type(argument) is int)


def _keys(operation: pickletools.OpcodeInfo, taken: list[_Extent]) -> list[_Extent]:
    """Return those of the operands of an operation, the last one first, that become keys of a dict or items of a
    set."""
    if operation.name in {"SETITEM", "SETITEMS", "DICT"}:
        return taken[1::2]
    return taken if operation.name in {"ADDITEMS", "FROZENSET"} else []


def _check_call(function: str, first: str, *, has_number: bool) -> None:
    """Refuse a call that makes an object of any size from a few bytes."""
    if function == CALLS_ANOTHER:
        makes = "rebuild" not in first or first == CALLS_ANOTHER
    else:
        makes = function.endswith(_MAKE_ANY_SIZE) or (function.endswith("bytearray") and has_number)
    if makes:
        raise pickle.UnpicklingError("it calls what makes an object of any size")
