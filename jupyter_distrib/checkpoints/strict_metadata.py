"""Reads the `.metadata` of somebody else without running code: the pickle may name only the classes that
`torch.distributed.checkpoint` puts into it. It gets stand-ins in their place, which hold what it says of them; the real
objects are made of those values that are what they should be."""

from __future__ import annotations

import io
import os
import pickle
import re
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from jupyter_distrib.checkpoints import pickle_limits
from jupyter_distrib.checkpoints.checks import checked_path, count, number_type, refuse, shape, text
from jupyter_distrib.system.private_torch import LAYOUT, MEMORY_FORMAT, STORAGE_INFO
from jupyter_distrib.worker.pytorch.private import storage_info

_MODULE = "torch.distributed.checkpoint.metadata"
_HELD = {
    (_MODULE, "Metadata"), (_MODULE, "TensorStorageMetadata"), (_MODULE, "BytesStorageMetadata"),
    (_MODULE, "MetadataIndex"), (_MODULE, "ChunkStorageMetadata"), (_MODULE, "TensorProperties"),
    (_MODULE, "StorageMeta"), STORAGE_INFO,
}  # fmt: skip
_IS_PATH = re.compile(r"pathlib(\._local)?\.(Posix|Windows)Path")


def metadata_from(content: bytes) -> Metadata:
    """Return what a pickle of a stranger says of a checkpoint.

    Raises:
        pickle.UnpicklingError: It names something else than the description of a checkpoint needs.
        ValueError: It holds something that does not belong there.
        Exception: It is damaged.
    """
    pickle_limits.check(content)
    found = _fields(_Unpickler(io.BytesIO(content)).load(), "Metadata")
    entries = _dict(found["state_dict_metadata"])
    paths = found.get("planner_data")
    return Metadata(
        state_dict_metadata={_shown(name): _entry(value) for name, value in entries.items()},
        planner_data=paths and {_shown(name): _shown_path(path) for name, path in _dict(paths).items()},
        storage_data={_index(key): _stored(value) for key, value in _dict(found["storage_data"]).items()},
    )


def _shown(name: object) -> str:
    """Return a name that messages may show: it adds no line and no terminal code to them."""
    if not text(name).isprintable():
        refuse("a name without control characters", name)
    return str(name)


def _shown_path(value: object) -> tuple[str | int, ...]:
    path = checked_path(value)
    for each in path:
        _shown(str(each))
    return path


class _Described:
    """An object of this name as a pickle describes it."""

    fields: object = None

    def __setstate__(self, fields: object) -> None:
        self.fields = fields


class _Unpickler(pickle.Unpickler):
    """An unpickler that gives stand-ins for a few classes and refuses all others."""

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
