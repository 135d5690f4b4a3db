"""Horovod's tensor operations, with their handles. Called in the thread that computes.

Under one name every rank calls the same operation; without a name, the n-th call of a kind goes with the n-th of the
other ranks. `Compression` chooses the form in which gradients are sent.
"""

# ruff: noqa: PLR0917 - Horovod's own signatures

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import torch

from jupyter_distrib.compat.horovod.context import ProcessSet, global_process_set
from jupyter_distrib.compat.horovod.negotiation import Negotiation
from jupyter_distrib.compat.horovod.requests import CollectiveRequest, SubmittedOperation

Average, Sum, Adasum, Min, Max, Product = "Average", "Sum", "Adasum", "Min", "Max", "Product"
_OPS = (Average, Sum, Min, Max, Product)
_numbers = count(1)
_issued: dict[int, Callable[[], Any]] = {}
_polls: dict[int, Callable[[], bool]] = {}


def poll(handle: int) -> bool:
    """Return whether the operation of a handle is done, so that `synchronize` will not wait.

    Raises:
        ValueError: There is no such handle, or its result has been taken.
    """
    if handle not in _polls:
        raise ValueError(f"there is no operation with the handle {handle!r}, or synchronize has taken its result")
    return _polls[handle]()


def synchronize(handle: Any) -> Any:
    """Wait for the operation of a handle and return its result; None if it has been taken.

    Raises:
        HorovodInternalError: The ranks disagree, or one is lost.
    """
    if callable(handle):
        return handle()
    wait, _ = _issued.pop(handle, None), _polls.pop(handle, None)
    return None if wait is None else wait()


def chosen_op(average: bool | None, op: str | None) -> str:
    """Return the reduction that a call asks for.

    Raises:
        ValueError: There is no such reduction, or it is specified twice.
        NotImplementedError: It is Adasum.
    """
    if average is not None and op is not None:
        raise ValueError("average= and op= exclude each other: give op=hvd.Average or op=hvd.Sum")
    chosen = op if op is not None else Sum if average is False else Average
    if chosen == Adasum:
        raise NotImplementedError("op=hvd.Adasum is not supported by jupyter_distrib: use hvd.Average")
    if chosen not in _OPS:
        raise ValueError(f"op must be one of {', '.join(f'hvd.{each}' for each in _OPS)}; got {op!r}")
    return chosen


def _submit(
    kind: str,
    tensor: torch.Tensor,
    name: str | None,
    process_set: ProcessSet,
    into: torch.Tensor | None = None,
    scales: tuple[float, float] = (1.0, 1.0),
    **fields: Any,
) -> tuple[Negotiation, SubmittedOperation]:
    negotiation = process_set.negotiating()
    request = CollectiveRequest(
        kind=kind,
        name=negotiation.name(kind, name),
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        device=tensor.device.type,
        **fields,
    )
    operation = SubmittedOperation(
        request=request, tensor=tensor.detach(), into=into, prescale=scales[0], postscale=scales[1]
    )
    negotiation.submit(operation)
    return negotiation, operation


def _handle(*submitted: tuple[Negotiation, SubmittedOperation], combine: Callable[[list[Any]], Any]) -> int:
    """Return a handle for a group of operations; `combine` combines their results."""
    number = next(_numbers)
    _issued[number] = lambda: combine([negotiation.wait_for(each) for negotiation, each in submitted])
    _polls[number] = lambda: all(negotiation.is_done(each) for negotiation, each in submitted)
    return number


def _only(results: list[Any]) -> Any:
    return results[0]


# ----------------------------------------------------------------------------------------------------------- allreduce


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to reduce a tensor over the ranks, and return a handle for the result."""
    scales = prescale_factor, postscale_factor
    submitted = _submit("allreduce", tensor, name, process_set, scales=scales, op=chosen_op(average, op))
    return _handle(submitted, combine=_only)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to reduce a tensor in place, and return a handle."""
    scales = prescale_factor, postscale_factor
    submitted = _submit("allreduce", tensor, name, process_set, tensor, scales, op=chosen_op(average, op))
    return _handle(submitted, combine=_only)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce a tensor in place."""
    handle = allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    reduced: torch.Tensor = synchronize(handle)
    return reduced


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to reduce several tensors, and return a handle for the list of results."""
    scales, chosen = (prescale_factor, postscale_factor), chosen_op(average, op)
    return _grouped("allreduce", tensors, name, process_set, scales=scales, op=chosen)


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to reduce several tensors in place, and return a handle for their list."""
    scales, chosen = (prescale_factor, postscale_factor), chosen_op(average, op)
    return _grouped("allreduce", tensors, name, process_set, in_place=True, scales=scales, op=chosen)


def _grouped(
    kind: str,
    tensors: Sequence[torch.Tensor],
    name: str | None,
    process_set: ProcessSet,
    *,
    in_place: bool = False,
    **fields: Any,
) -> int:
    names = [None if name is None else f"{name}.{number}" for number in range(len(tensors))]
    submitted = [
        _submit(kind, tensor, each, process_set, tensor if in_place else None, **fields)
        for tensor, each in zip(tensors, names, strict=True)
    ]
    return _handle(*submitted, combine=list)


def grouped_allreduce(tensors: Sequence[torch.Tensor], *args: Any, **keywords: Any) -> list[torch.Tensor]:
    """Reduce several tensors; the arguments are those of `grouped_allreduce_async`."""
    reduced: list[torch.Tensor] = synchronize(grouped_allreduce_async(tensors, *args, **keywords))
    return reduced


def grouped_allreduce_(tensors: Sequence[torch.Tensor], *args: Any, **keywords: Any) -> list[torch.Tensor]:
    """Reduce several tensors in place; the arguments are those of `grouped_allreduce_async`."""
    reduced: list[torch.Tensor] = synchronize(grouped_allreduce_async_(tensors, *args, **keywords))
    return reduced


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: str, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Begin to sum or average a sparse tensor, and return a handle for `synchronize`."""
    if chosen_op(None, op) not in {Average, Sum}:
        raise ValueError(f"a sparse tensor can be reduced by hvd.Average and hvd.Sum; got hvd.{op}")
    whole = tensor.coalesce()
    indices = allgather_async(whole.indices().t(), f"{name}.indices", process_set)
    values = allgather_async(whole.values(), f"{name}.values", process_set)

    def handle() -> torch.Tensor:
        all_indices, all_values = synchronize(indices), synchronize(values)
        if op == Average:
            all_values = all_values / process_set.size()
        return torch.sparse_coo_tensor(all_indices.t(), all_values, tensor.shape).coalesce()

    return handle


# --------------------------------------------------------------------------------------------------- the other kinds


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Begin to concatenate the ranks' tensors along the first dimension, which may differ; return a handle."""
    if not tensor.dim():
        raise ValueError("allgather needs a tensor with at least one dimension")
    return _handle(_submit("allgather", tensor, name, process_set), combine=_only)


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin to gather several tensors, and return a handle for the list of results."""
    return _grouped("allgather", tensors, name, process_set)


def _root(root_rank: int, process_set: ProcessSet) -> int:
    if root_rank not in (ranks := process_set.ranks or []):
        raise ValueError(f"root_rank {root_rank} is not one of the ranks {ranks}")
    return root_rank


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin to broadcast one rank's tensor to all, and return a handle."""
    process_set.negotiating()
    submitted = _submit("broadcast", tensor, name, process_set, root=_root(root_rank, process_set))
    return _handle(submitted, combine=_only)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin to broadcast one rank's tensor to all, in place, and return a handle."""
    process_set.negotiating()
    submitted = _submit("broadcast", tensor, name, process_set, tensor, root=_root(root_rank, process_set))
    return _handle(submitted, combine=_only)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Broadcast one rank's tensor to all, in place."""
    brought: torch.Tensor = synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return brought


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to send a part of the rows to each rank; return a handle for the rows received and their numbers by rank.

    Without `splits`, each rank gets equally many rows, and the result is the rows alone.
    """
    size = process_set.size()
    if splits is None and (not tensor.dim() or tensor.shape[0] % size):
        raise ValueError(
            f"alltoall without splits needs a number of rows divisible by {size}; got {tuple(tensor.shape)}"
        )
    parts = [tensor.shape[0] // size] * size if splits is None else [int(each) for each in splits]
    if len(parts) != size or sum(parts) != tensor.shape[0] or min(parts) < 0:
        raise ValueError(f"splits must have {size} numbers with the sum {tensor.shape[0]}; got {parts}")
    submitted = _submit("alltoall", tensor, name, process_set, splits=tuple(parts))
    if splits is None:
        return _handle(submitted, combine=lambda results: results[0][0])
    return _handle(submitted, combine=_only)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begin to reduce a tensor and to give each rank a part of the rows; return a handle."""
    _check_scattered(tensor, op)
    scales = prescale_factor, postscale_factor
    return _handle(_submit("reducescatter", tensor, name, process_set, scales=scales, op=op), combine=_only)


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begin to reduce and scatter several tensors, and return a handle for the list of results."""
    for each in tensors:
        _check_scattered(each, op)
    scales = prescale_factor, postscale_factor
    return _grouped("reducescatter", tensors, name, process_set, scales=scales, op=op)


def _check_scattered(tensor: torch.Tensor, op: str) -> None:
    if chosen_op(None, op) not in {Average, Sum}:
        raise ValueError(f"reducescatter takes hvd.Average and hvd.Sum; got hvd.{op}")
    if not tensor.dim():
        raise ValueError("reducescatter needs a tensor with at least one dimension")


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of the set have called it."""
    synchronize(_handle(_submit("barrier", torch.empty(0), None, process_set), combine=_only))


def join(device: int = -1) -> int:
    """Take part in the other ranks' allreduces with zeros until all ranks have called it; return the last that did."""
    return global_process_set.negotiating().join()


class NoneCompressor:
    """Sends tensors unchanged."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class FP16Compressor:
    """Sends floating-point numbers with 16 bits."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return (tensor.half() if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx)


class Compression:
    """The available compressions."""

    none = NoneCompressor
    fp16 = FP16Compressor
