"""Compares and exchanges weights between ranks, so that they start with equal ones. Collective: every rank of the group
calls these functions in the same order."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from jupyter_distrib.worker.autoparallel import object_collectives
from jupyter_distrib.worker.autoparallel.checks import tensor_sums

BROADCAST_BYTES = 250 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFingerprint:
    """A fingerprint of tensors, to compare them without sending them."""

    form: tuple[tuple[object, ...], ...]
    """Shape and type of each tensor."""
    sums: tuple[int, ...]
    """Sum of each tensor's bits as integers, equal for equal contents on any device."""


def fingerprint(tensors: Sequence[torch.Tensor]) -> WeightFingerprint:
    sums = tensor_sums.bits(tensors) if object_collectives.others.have_values else ()
    return WeightFingerprint(form=tuple((*tensor.shape, str(tensor.dtype)) for tensor in tensors), sums=tuple(sums))


def fingerprints_of_all(tensors: Sequence[torch.Tensor]) -> list[WeightFingerprint]:
    """Return the fingerprints of these tensors on all ranks, in rank order."""
    return [fingerprints for (fingerprints,) in fingerprints_of_sets([tensors])]


def fingerprints_of_sets(sets: Sequence[Sequence[torch.Tensor]]) -> list[list[WeightFingerprint]]:
    """Return the fingerprints of every rank's sets of tensors, in rank order; the number of sets may differ between
    ranks."""
    own_sets = [dataclasses.astuple(fingerprint(each)) for each in sets]
    return [[_read(*each) for each in rank_sets] for rank_sets in object_collectives.gather(own_sets)]


def _read(form: list[list[object]], sums: list[int]) -> WeightFingerprint:
    return WeightFingerprint(form=tuple(map(tuple, form)), sums=tuple(sums))


def same_form(every: Sequence[WeightFingerprint]) -> bool:
    return all(each.form == every[0].form for each in every)


def copy_from_rank_0(tensors: Sequence[torch.Tensor]) -> None:
    """Copy the contents of these tensors from rank 0 to all ranks."""
    with torch.no_grad():
        plain = [tensor.detach() for tensor in tensors if tensor.layout is torch.strided]
        if plain:  # as DistributedDataParallel does: pieces for each device and type, two in flight at a time
            object_collectives.others.copy_from_rank_0(plain, BROADCAST_BYTES)


def summed(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the values summed over ranks: tensors as tensors, numbers as numbers of the same kind."""
    out = []
    for value in values:
        is_tensor = isinstance(value, torch.Tensor)
        kind = torch.int64 if isinstance(value, (bool, int)) else torch.float64
        tensor = value.detach().clone() if is_tensor else torch.tensor(value, dtype=kind, device="cpu")
        dist.all_reduce(tensor)
        out.append(tensor if is_tensor else tensor.item())
    return tuple(out)
