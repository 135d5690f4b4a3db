"""The layout of a checkpoint, from its `.metadata` alone: each entry's path in the saved nested dict, and empty tensors
of the same shape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from jupyter_distrib.errors import DistributedError

Path = tuple[str | int, ...]
Entry = Any
"""`TensorStorageMetadata` of a tensor, or `BytesStorageMetadata` of anything else."""


def entries(metadata: Metadata, *prefix: str) -> dict[Path, Entry]:
    """Return all entries below a prefix, by the remainder of their path."""
    given: Mapping[str, Path] = metadata.planner_data or {}
    paths = {given.get(key, (key,)): entry for key, entry in metadata.state_dict_metadata.items()}
    return {path[len(prefix) :]: entry for path, entry in paths.items() if path[: len(prefix)] == prefix}


def names(metadata: Metadata) -> list[str]:
    return list(dict.fromkeys(str(path[0]) for path in entries(metadata)))


def is_tensor(entry: Entry) -> bool:
    return isinstance(entry, TensorStorageMetadata)


def size(entry: Entry) -> tuple[int, ...]:
    return tuple(entry.size)


def empty(entry: Entry) -> torch.Tensor | None:
    """Return an empty tensor on the CPU; None for an entry that is not a tensor."""
    return torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu") if is_tensor(entry) else None


def nested(found: Mapping[Path, Entry]) -> Any:
    """Return the dicts and lists as they were saved, with empty tensors."""
    if () in found:
        return empty(found[()])
    inner: dict[str | int, dict[Path, Entry]] = {}
    for (first, *rest), entry in found.items():
        inner.setdefault(first, {})[tuple(rest)] = entry
    items = {key: nested(below) for key, below in inner.items()}
    is_list = bool(items) and all(isinstance(key, int) for key in items)
    return [items[index] for index in sorted(items)] if is_list else items


def refuse(problem: str) -> NoReturn:
    raise DistributedError(f"{problem}; nothing was loaded.")


def refuse_if_any(problems: Iterable[str]) -> None:
    """Raise the first of the problems, with their number."""
    if found := list(problems):
        refuse(found[0] + (f", and {len(found) - 1} more do not match" if len(found) > 1 else ""))
