"""One rank's share of a stream that consists of shards: each rank reads only its own shards. Streams of Hugging Face's
`datasets`, and pipelines of `webdataset`.

Shards may differ in length, so ranks check with one another before each batch, and stop when the first of them runs
out. Rank's main thread; the stream itself is read by the loader's workers.
"""

from __future__ import annotations

import copy
import importlib
import itertools
import sys
from collections.abc import Iterable, Iterator, Sized
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from jupyter_distrib.errors import DistributedError
from jupyter_distrib.libraries import known

_ONE_NODE = "single_node_only"
"""Name of the stage that makes a pipeline of `webdataset` refuse several ranks."""


class ShardsOfStream(IterableDataset[Any]):
    """This rank's shards of a stream."""

    def __init__(self, whole: Any, own: Any, size: int) -> None:
        self.stream, self.num_replicas = own, size
        self._whole = whole

    def __iter__(self) -> Iterator[Any]:
        return iter(self.stream)

    def __len__(self) -> int:
        return len(self._whole) // self.num_replicas

    def follow(self) -> None:
        """Take over what was set in the whole stream; called before each pass, and before workers get their copies."""


class ShardsOfDatasets(ShardsOfStream):
    """A share of a stream of `datasets`, which has an epoch and a position."""

    def follow(self) -> None:
        self.stream.set_epoch(self._whole.epoch)

    def set_epoch(self, epoch: int) -> None:
        self._whole.set_epoch(epoch)
        self.stream.set_epoch(epoch)

    def state_dict(self) -> Any:
        return self.stream.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.stream.load_state_dict(state)


def by_shards(stream: Any, rank: int, size: int) -> ShardsOfStream | None:
    """Return a rank's share of a stream that can be divided by shards; None for any other stream.

    Raises:
        DistributedError: It can only be divided by its shards, and has too few.
    """
    datasets, webdataset = sys.modules.get("datasets"), sys.modules.get("webdataset")
    is_stream = datasets is not None and isinstance(stream, datasets.IterableDataset)
    if is_stream and stream.num_shards % size == 0 and not known.counts_samples(stream):
        distributed: Any = importlib.import_module("datasets.distributed")
        own = distributed.split_dataset_by_node(stream, rank=rank, world_size=size)
        return ShardsOfDatasets(stream, own, size)
    if webdataset is not None and isinstance(stream, webdataset.DataPipeline):
        return _of_pipeline(stream, rank, size)
    return None


def allow_ranks(stream: Any) -> None:
    """Remove from a pipeline of `webdataset` the stage that refuses several ranks."""
    webdataset = sys.modules.get("webdataset")
    if webdataset is not None and isinstance(stream, webdataset.DataPipeline):
        stream.pipeline[:] = [each for each in stream.pipeline if getattr(each, "__name__", "") != _ONE_NODE]


def _of_pipeline(stream: Any, rank: int, size: int) -> ShardsOfStream | None:
    """Divide a pipeline behind its first stage, which lists the shards."""
    shards, *stages = stream.pipeline
    if isinstance(shards, type(stream)):
        return None
    if isinstance(shards, Sized) and len(shards) < size:
        raise DistributedError(
            f"{type(stream).__name__} has too few shards ({len(shards)}): {size} ranks need at least {size}, one for "
            "each. Write more shards, or use fewer ranks."
        )
    own = copy.copy(stream)
    own.pipeline = [shards, partial(_dealt, rank=rank, size=size), *stages]
    own.nsamples = stream.nsamples // size if stream.nsamples > 0 else stream.nsamples
    return ShardsOfStream(stream, own, size)


def _dealt(shards: Iterable[Any], *, rank: int, size: int) -> Iterator[Any]:
    return itertools.islice(shards, rank, None, size)


def ending_together(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield batches until one of the ranks runs out. One collective per batch."""
    for batch in batches:
        if not _all_have_one(True):
            return
        yield batch
    _all_have_one(False)


def _all_have_one(mine: bool) -> bool:
    have = torch.tensor([int(mine)])
    dist.all_reduce(have, op=dist.ReduceOp.MIN)
    return bool(have)
