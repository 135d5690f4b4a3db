"""The memory that a kept value holds: its tensors, through models, optimizers and containers. Nothing is copied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

import torch
from torch import nn

DEPTH = 5
"""The depth of containers, as in an optimizer's state: beyond it nothing is looked for."""
MOST = 1000
"""The number of items of a container that are looked at; one with more is none of tensors alone."""
MOST_IN_ALL = 20_000
"""The number of objects that are looked at in one value, which takes about 10 ms at the end of a cell."""


def size_bytes(value: object) -> int:
    """Return the bytes of the storages of all tensors in a value; of a sharded one, those of this rank's part."""
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
