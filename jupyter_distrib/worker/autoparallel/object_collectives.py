"""Pickled objects that ranks exchange over the process group. Collective; runs in the rank's main thread.

torch's own object collectives want numpy, which a kernel need not have.
"""

from __future__ import annotations

import ctypes
import pickle
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def gather(mine: T) -> list[T]:
    """Return the objects of all ranks, in rank order."""
    data = pickle.dumps(mine)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(data)]))
    longest = max(int(size) for size in sizes)
    every = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(every, _as_tensor(data.ljust(longest, b"\0")))
    return [_read(tensor) for tensor in every]


def from_rank_0(mine: T) -> T:
    """Return the object of rank 0."""
    data = pickle.dumps(mine) if dist.get_rank() == 0 else b""
    size = torch.tensor([len(data)])
    dist.broadcast(size, src=0)
    tensor = _as_tensor(data) if data else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(tensor, src=0)
    given: T = _read(tensor)
    return given


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _read(tensor: torch.Tensor) -> Any:
    """Unpickle; a pickle knows its end, whatever follows it."""
    return pickle.loads(ctypes.string_at(tensor.data_ptr(), tensor.numel()))
