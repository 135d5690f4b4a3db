"""Horovod's blocking operations, with gradients as Horovod defines them."""

# ruff: noqa: PLR0917 - Horovod's own signatures

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from jupyter_distrib.compat.horovod.collectives import (
    Average,
    Compression,
    Sum,
    allgather_async,
    allreduce_async,
    alltoall_async,
    broadcast_async,
    chosen_op,
    grouped_allgather_async,
    grouped_reducescatter_async,
    reducescatter_async,
    synchronize,
)
from jupyter_distrib.compat.horovod.context import ProcessSet, global_process_set
from jupyter_distrib.compat.horovod.operations import rows_by_rank


class AllreduceFunction(torch.autograd.Function):
    """An allreduce whose gradient is reduced in the same way."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *asked: Any) -> Any:
        name, op, scales, ctx.process_set = asked
        ctx.op, ctx.scales = op, scales
        return synchronize(allreduce_async(tensor, None, name, op, scales[0], scales[1], ctx.process_set))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if ctx.op not in {Average, Sum}:
            raise NotImplementedError(f"there is no gradient of an allreduce with hvd.{ctx.op}: use hvd.Average or Sum")
        before, after = ctx.scales
        reduced = synchronize(allreduce_async(gradients[0], None, None, ctx.op, before, after, ctx.process_set))
        return reduced, None, None, None, None


class AllgatherFunction(torch.autograd.Function):
    """An allgather; the gradient is the average of the ranks' gradients for this rank's rows."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, process_set: ProcessSet) -> Any:
        ctx.process_set = process_set
        rows = synchronize(allgather_async(torch.tensor([tensor.shape[0]]), None, process_set)).tolist()
        own = process_set.rank()
        ctx.begin, ctx.rows = sum(rows[:own]), rows[own]
        return synchronize(allgather_async(tensor, name, process_set))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        reduced = synchronize(allreduce_async(gradients[0], process_set=ctx.process_set))
        return reduced.narrow(0, ctx.begin, ctx.rows), None, None


class BroadcastFunction(torch.autograd.Function):
    """A broadcast; the gradient is the average of the ranks' gradients on the root, and zero elsewhere."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Any:
        ctx.is_root, ctx.process_set = _own(process_set) == root_rank, process_set
        return synchronize(broadcast_async(tensor, root_rank, name, process_set))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        reduced = synchronize(allreduce_async(gradients[0], process_set=ctx.process_set))
        return (reduced if ctx.is_root else reduced * 0), None, None, None


class AlltoallFunction(torch.autograd.Function):
    """An alltoall; the gradients go back to where the rows came from."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet) -> Any:
        ctx.process_set = process_set
        output, ctx.received = synchronize(alltoall_async(tensor, splits, name, process_set))
        ctx.mark_non_differentiable(ctx.received)
        return output, ctx.received

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        back, _ = synchronize(alltoall_async(gradients[0].contiguous(), ctx.received, None, ctx.process_set))
        return back, None, None, None


class ReducescatterFunction(torch.autograd.Function):
    """A reducescatter; the gradient is the gathered gradients, times the number of ranks for a sum."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *asked: Any) -> Any:
        name, op, scales, ctx.process_set = asked
        ctx.factor = scales[0] * scales[1] * (ctx.process_set.size() if op == Sum else 1)
        return synchronize(reducescatter_async(tensor, name, op, ctx.process_set, *scales))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        whole = synchronize(allgather_async(gradients[0].contiguous(), None, ctx.process_set))
        return whole * ctx.factor, None, None, None, None


def _own(process_set: ProcessSet) -> int:
    assert process_set.ranks is not None
    return process_set.ranks[process_set.rank()]


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return the tensor reduced over the ranks, averaged by default."""
    sent, context = compression.compress(tensor)
    scales = prescale_factor, postscale_factor
    reduced = AllreduceFunction.apply(sent, name, chosen_op(average, op), scales, process_set)  # type: ignore[no-untyped-call]
    result: torch.Tensor = compression.decompress(reduced, context)
    return result


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the ranks' tensors, concatenated along the first dimension, which may differ."""
    result: torch.Tensor = AllgatherFunction.apply(tensor, name, process_set)  # type: ignore[no-untyped-call]
    return result


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Return the result of `allgather` for each tensor, without gradients."""
    results: list[torch.Tensor] = synchronize(grouped_allgather_async(tensors, name, process_set))
    return results


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return one rank's tensor on all ranks."""
    result: torch.Tensor = BroadcastFunction.apply(tensor, root_rank, name, process_set)  # type: ignore[no-untyped-call]
    return result


def alltoall(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows to each rank and return the rows received, with `splits` also their numbers by rank."""
    parts = splits
    if parts is None:
        size = process_set.size()
        if not tensor.dim() or tensor.shape[0] % size:
            raise ValueError(
                f"alltoall without splits needs a number of rows divisible by {size}; got {tuple(tensor.shape)}"
            )
        parts = rows_by_rank(tensor.shape[0], size)
    output, received = AlltoallFunction.apply(tensor, parts, name, process_set)  # type: ignore[no-untyped-call]
    return output if splits is None else (output, received)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return this rank's part of the rows of the reduced tensor."""
    sent, context = compression.compress(tensor)
    scales = prescale_factor, postscale_factor
    scattered = ReducescatterFunction.apply(sent, name, op, scales, process_set)  # type: ignore[no-untyped-call]
    result: torch.Tensor = compression.decompress(scattered, context)
    return result


def grouped_reducescatter(tensors: Sequence[torch.Tensor], *args: Any, **keywords: Any) -> list[torch.Tensor]:
    """Return the result of `reducescatter` for each tensor, without gradients."""
    results: list[torch.Tensor] = synchronize(grouped_reducescatter_async(tensors, *args, **keywords))
    return results
