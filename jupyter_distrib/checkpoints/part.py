"""The part of a checkpoint written by one rank, described in JSON, from which rank 0 builds `.metadata`. A pickle could
run code of anybody who may write into the folder; JSON yields names, numbers and shapes, or is refused.

    [{"name": "model.weight", "path": ["model", "weight"],
      "tensor": {"dtype": "float32", "size": [8, 4], "offsets": [4, 0], "sizes": [4, 4]},     null for a pickle
      "sharded": true, "file": "__6f...__1_0.distcp", "offset": 0, "length": 1234}, ...]
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from jupyter_distrib.checkpoints.checks import checked_path, count, number_type, refuse, shape, text, with_keys
from jupyter_distrib.worker.pytorch.private import storage_info

MOST_BYTES = 1 << 28
"""Largest file to read: a million entries."""
_KEYS = frozenset({"name", "path", "tensor", "sharded", "file", "offset", "length"})
_TENSOR_KEYS = frozenset({"dtype", "size", "offsets", "sizes"})

Part = tuple[SavePlan, list[WriteResult]]


def mark(save_id: str, rank: int) -> str:
    """Return the prefix of the names of a rank's files in one save."""
    return f"__{save_id}__{rank}_"


def as_json(plan: SavePlan, results: list[WriteResult]) -> bytes:
    items = {item.index: item for item in plan.items}
    return json.dumps([_as_plain(items[each.index], each.storage_data, plan.planner_data) for each in results]).encode()


def from_json(content: bytes, *, save_id: str, rank: int) -> Part:
    """Return the description of a rank's part.

    Raises:
        ValueError: A rank of this save would not write this; the error says where.
    """
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}") from None
    if not isinstance(found, list):
        refuse("a list", found)
    is_file = re.compile(re.escape(mark(save_id, rank)) + r"[0-9]{1,9}\.distcp")
    items, results, paths = list[WriteItem](), list[WriteResult](), dict[str, tuple[str | int, ...]]()
    for each in found:
        entry = with_keys(each, _KEYS)
        name = text(entry["name"])
        paths[name] = checked_path(entry["path"])
        items.append(_item(name, entry["tensor"], entry["sharded"]))
        if not is_file.fullmatch(file := text(entry["file"])):
            refuse("a file of this save and rank", file)
        offset, length = count(entry["offset"]), count(entry["length"])
        stored = storage_info()(relative_path=file, offset=offset, length=length)
        results.append(WriteResult(index=items[-1].index, size_in_bytes=length, storage_data=stored))
    return SavePlan(items, planner_data=paths), results


def _as_plain(item: WriteItem, stored: Any, paths: Mapping[str, Any]) -> dict[str, Any]:
    about = item.tensor_data
    return {
        "name": item.index.fqn,
        "path": list(paths[item.index.fqn]),
        "tensor": about
        and {
            "dtype": str(about.properties.dtype).removeprefix("torch."),
            "size": list(about.size),
            "offsets": list(about.chunk.offsets),
            "sizes": list(about.chunk.sizes),
        },
        "sharded": item.type is WriteItemType.SHARD,
        "file": stored.relative_path,
        "offset": stored.offset,
        "length": stored.length,
    }


def _item(name: str, tensor: object, sharded: object) -> WriteItem:
    if not isinstance(sharded, bool):
        refuse("true or false", sharded)
    if tensor is None:
        return WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)
    about = with_keys(tensor, _TENSOR_KEYS)
    size, offsets, sizes = (shape(about[key]) for key in ("size", "offsets", "sizes"))
    if not len(size) == len(offsets) == len(sizes):
        refuse("shapes of equally many dimensions", tensor)
    dtype = number_type(about["dtype"])
    chunk = ChunkStorageMetadata(offsets=offsets, sizes=sizes)
    return WriteItem(
        MetadataIndex(name, offsets),
        WriteItemType.SHARD if sharded else WriteItemType.TENSOR,
        tensor_data=TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=dtype), size=size),
    )
