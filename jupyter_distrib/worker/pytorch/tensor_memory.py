"""Measures the memory of the tensors in a kept value, through models, optimizers and containers, without copying."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

import torch
from torch import nn

DEPTH = 5
"""Depth of nested containers to search; that of an optimizer's state suffices."""
MOST = 1000
"""Largest container to search: one with more items is not a collection of tensors."""
MOST_IN_ALL = 20_000
"""Maximum number of objects to inspect in one value, which takes about 10 ms at the end of a cell."""


def size_bytes(value: object) -> int:
    """Return the total size of the tensors' storages in a value; of a sharded tensor, only this rank's part counts."""
    storages = {}
    for tensor in islice(_leaves(value, DEPTH), MOST_IN_ALL):
        if tensor is None:
            continue
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if type(local).__module__.partition(".")[0] == "torch" and local.layout == torch.strided and not local.is_meta:
            storage = local.untyped_storage()
            storages[local.device, storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _leaves(value: object, depth: int) -> Iterator[torch.Tensor | None]:
    """Yield the tensors in a value, and None for whatever else is in it."""
    match value:
        case torch.Tensor():
            yield value
            if value.is_leaf and value.grad is not None:
                yield value.grad
        case nn.Module():
            for each in (*value.parameters(), *value.buffers()):
                yield from _leaves(each, depth)
        case torch.optim.Optimizer():
            for each in (
                *value.state.values(),
                *(tensor for group in value.param_groups for tensor in group["params"]),
            ):
                yield from _leaves(each, depth)
        case Mapping() | list() | tuple() if depth and len(value) <= MOST:
            yield None
            for each in value.values() if isinstance(value, Mapping) else value:
                yield from _leaves(each, depth - 1)
        case _:
            yield None
