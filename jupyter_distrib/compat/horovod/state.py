"""Copies objects, and the state of models and optimizers, from one rank to all."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from jupyter_distrib.compat.horovod.collectives import (
    allgather_async,
    broadcast_,
    broadcast_async_,
    synchronize,
)
from jupyter_distrib.compat.horovod.context import ProcessSet, global_process_set, rank


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Set the tensors, such as a model's `state_dict()` or `named_parameters()`, to those of one rank, in place.

    Raises:
        ValueError: These are not names with tensors.
    """
    pairs = sorted(params.items()) if isinstance(params, Mapping) else list(params)
    if not all(isinstance(each, tuple) and len(each) == 2 for each in pairs):
        raise ValueError("broadcast_parameters takes model.state_dict() or model.named_parameters()")
    tensors = [(name, value.data) for name, value in pairs if isinstance(value, torch.Tensor)]
    handles = [broadcast_async_(tensor, root_rank, f"parameter.{name}", process_set) for name, tensor in tensors]
    for handle in handles:
        synchronize(handle)


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return one rank's object on all ranks, by pickle."""
    if rank() == root_rank:
        _brought(pickle.dumps(obj), root_rank, name, process_set)
        return obj
    return pickle.loads(_brought(b"", root_rank, name, process_set))


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: Any = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Set the state of an optimizer, with its learning rates and the like, to that of one rank."""
    data = io.BytesIO()
    if rank() == root_rank:
        torch.save(optimizer.state_dict(), data)
        _brought(data.getvalue(), root_rank, None, process_set)
        return
    brought = io.BytesIO(_brought(b"", root_rank, None, process_set))
    optimizer.load_state_dict(torch.load(brought, map_location="cpu", weights_only=False))


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the objects of all ranks, by rank, by pickle."""
    data = _tensor(pickle.dumps(obj))
    names = [None, None] if name is None else [f"{name}.size", f"{name}.data"]
    sizes = allgather_async(torch.tensor([len(data)]), names[0], process_set)
    whole = synchronize(allgather_async(data, names[1], process_set))
    parts = whole.split(synchronize(sizes).tolist())
    return [pickle.loads(part.numpy().tobytes()) for part in parts]


def _brought(data: bytes, root_rank: int, name: str | None, process_set: ProcessSet) -> bytes:
    """Return one rank's bytes on all ranks."""
    names = [None, None] if name is None else [f"{name}.size", f"{name}.data"]
    size = broadcast_(torch.tensor([len(data)]), root_rank, names[0], process_set)
    sent = _tensor(data) if rank() == root_rank else torch.empty(int(size), dtype=torch.uint8)
    return broadcast_(sent, root_rank, names[1], process_set).numpy().tobytes()


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
