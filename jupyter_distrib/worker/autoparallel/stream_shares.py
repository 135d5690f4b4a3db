"""One rank's share of a stream of Hugging Face's `datasets`, which divides itself by its shards: nobody reads the rest.

Shards may differ in length, so ranks ask one another before each batch, and end when the first of them has none.
Rank's main thread; the stream itself is read by the loader's workers.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset


class ShardsOfStream(IterableDataset[Any]):
    """The shards of a stream that are this rank's."""

    def __init__(self, stream: Any, rank: int, size: int) -> None:
        distributed: Any = importlib.import_module("datasets.distributed")
        self.stream = distributed.split_dataset_by_node(stream, rank=rank, world_size=size)
        self.num_replicas = size

    def __iter__(self) -> Iterator[Any]:
        return iter(self.stream)

    def set_epoch(self, epoch: int) -> None:
        self.stream.set_epoch(epoch)

    def state_dict(self) -> Any:
        return self.stream.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.stream.load_state_dict(state)


def divides_by_shards(stream: Any, size: int) -> bool:
    """Return whether a stream has as many shards for each rank."""
    library = sys.modules.get("datasets")
    return library is not None and isinstance(stream, library.IterableDataset) and stream.num_shards % size == 0


def ending_together(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield batches until one of the ranks has no more. Collective for each batch."""
    for batch in batches:
        if not _all_have_one(True):
            return
        yield batch
    _all_have_one(False)


def _all_have_one(mine: bool) -> bool:
    have = torch.tensor([int(mine)])
    dist.all_reduce(have, op=dist.ReduceOp.MIN)
    return bool(have)
