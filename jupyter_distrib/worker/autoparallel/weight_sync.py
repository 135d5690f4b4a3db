"""The start of ranks with the same weights. Collective: every rank of the group calls these functions in the same
order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

BROADCAST_BYTES = 250 * 1024 * 1024

_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFingerprint:
    """A fingerprint of tensors, without sending them."""

    form: tuple[tuple[object, ...], ...]
    """Shape and type of each."""
    sums: tuple[int, ...]
    """The sum of each tensor's bits, taken as whole numbers: equal for equal contents on whatever device."""


def fingerprint(tensors: Sequence[torch.Tensor]) -> WeightFingerprint:
    sums = [_sum_of_bits(tensor.detach()) for tensor in tensors]
    return WeightFingerprint(
        form=tuple((*tensor.shape, str(tensor.dtype)) for tensor in tensors),
        sums=tuple(torch.stack([each.cpu() for each in sums]).tolist()) if sums else (),
    )


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided or tensor.is_meta:
        return torch.zeros((), dtype=torch.int64)
    whole = _WHOLE.get(tensor.element_size())
    if tensor.is_complex() or whole is None:
        return torch.view_as_real(tensor).double().sum().view(torch.int64)
    return tensor.view(whole).sum(dtype=torch.int64)


def same_form(every: Sequence[WeightFingerprint]) -> bool:
    return all(each.form == every[0].form for each in every)


def take_from_rank_0(tensors: Sequence[torch.Tensor]) -> None:
    """Give every rank the contents that these tensors have on rank 0."""
    with torch.no_grad():
        plain = [tensor.detach() for tensor in tensors if tensor.layout is torch.strided]
        world = dist.distributed_c10d._get_default_group()  # noqa: SLF001
        if plain:  # as DistributedDataParallel does: a piece for each device and type, two on their way at a time
            dist._broadcast_coalesced(world, plain, BROADCAST_BYTES, 0)  # type: ignore[attr-defined]  # noqa: SLF001


def summed(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Sum over ranks: a tensor as a tensor, a number as a number of its kind."""
    out = []
    for value in values:
        is_tensor = isinstance(value, torch.Tensor)
        kind = torch.int64 if isinstance(value, (bool, int)) else torch.float64
        tensor = value.detach().clone() if is_tensor else torch.tensor(value, dtype=kind)
        dist.all_reduce(tensor)
        out.append(tensor if is_tensor else tensor.item())
    return tuple(out)
