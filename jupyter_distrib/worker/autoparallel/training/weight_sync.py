"""Compares and exchanges weights between ranks, so that they start with equal ones. Collective: every rank of the group
calls these functions in the same order."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from jupyter_distrib.errors import DistributedError
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
            sent = [each if _in_memory(each) is each else each.contiguous() for each in plain]
            object_collectives.others.copy_from_rank_0(sent, BROADCAST_BYTES)
            for tensor, copied in zip(plain, sent, strict=True):
                if copied is not tensor:
                    own = _in_memory(tensor)
                    own.copy_(copied[tuple(map(slice, own.shape))])


def _in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of an expanded tensor that lie in memory, each once; any other tensor itself."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def summed(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the values summed over ranks: tensors as tensors, numbers as numbers of the same kind, dicts, lists and
    tuples item by item.

    Raises:
        DistributedError: They cannot be added, or are not the same things on all ranks.
    """
    form = _form(values, "a value")
    if other := next((each for each in object_collectives.gather(form) if each != form), ""):
        raise DistributedError(
            f"total() was given {form} on this rank and {other} on another one: give the same keys, in the same form, "
            "on every rank."
        )
    return tuple(map(_sum, values))


def _form(value: Any, where: str) -> str:
    """Return the kinds of the items in a value, as text that can be compared."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {_form(value[key], repr(key))}' for key in sorted(value, key=repr))}}}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(_form(each, where) for each in value)})"
    if isinstance(value, torch.Tensor):
        return f"tensor{tuple(value.shape)}"
    if isinstance(value, numbers.Real):
        return "number"
    raise DistributedError(
        f"total() adds numbers and tensors, also in dicts and lists, and {where} is {type(value).__name__}: give "
        "value.item() or torch.as_tensor(value)."
    )


def _sum(value: Any) -> Any:
    if isinstance(value, Mapping):
        sums = {key: _sum(value[key]) for key in sorted(value, key=repr)}  # each rank may have them in another order
        return {key: sums[key] for key in value}
    if isinstance(value, (list, tuple)):
        sums_of_items = map(_sum, value)
        return type(value)(*sums_of_items) if hasattr(value, "_fields") else type(value)(sums_of_items)
    is_tensor = isinstance(value, torch.Tensor)
    kind = torch.int64 if isinstance(value, numbers.Integral) else torch.float64
    tensor = value.detach().clone() if is_tensor else torch.tensor(value, dtype=kind, device="cpu")
    dist.all_reduce(tensor)
    return tensor if is_tensor else tensor.item()
