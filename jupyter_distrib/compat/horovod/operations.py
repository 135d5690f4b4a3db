"""Executes operations that all ranks of a process set have agreed on, by torch.distributed.

Every rank of the set calls `perform` with the same operations in the same order. Nothing here blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from jupyter_distrib.compat.horovod.requests import CollectiveRequest, SubmittedOperation

FUSION_BYTES = 64 << 20
"""Maximum number of bytes to reduce in one piece, as is Horovod's default."""
_REDUCTIONS = {
    "Average": dist.ReduceOp.SUM,
    "Sum": dist.ReduceOp.SUM,
    "Min": dist.ReduceOp.MIN,
    "Max": dist.ReduceOp.MAX,
    "Product": dist.ReduceOp.PRODUCT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreedOperation:
    """An operation issued by all ranks that have not joined."""

    requests: Mapping[int, CollectiveRequest]
    """The requests by the rank's number in the set."""
    mine: SubmittedOperation | None
    """This rank's own request; None if the rank has joined."""

    @property
    def any(self) -> CollectiveRequest:
        return next(iter(self.requests.values()))

    @property
    def fusion(self) -> tuple[str, ...]:
        """Properties that operations must share to be reduced in one piece; empty if this is not a reduction."""
        one = self.any
        return (one.op, one.dtype, one.device) if one.kind in {"allreduce", "reducescatter"} else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SetGroup:
    """The torch process group of a process set, as one of its ranks holds it."""

    group: Any
    ranks: tuple[int, ...]
    """The global ranks of its members."""
    own: int
    """This rank's number in the set."""


def perform(agreed: Sequence[AgreedOperation], of: SetGroup) -> None:
    """Start the operations, and set the works and the `finish` function of those of this rank."""
    for batch in _batches(agreed):
        if batch[0].fusion:
            _reduce(batch, of)
        elif batch[0].mine is not None:
            _MOVES[batch[0].any.kind](batch[0], batch[0].mine, of)


def _batches(agreed: Sequence[AgreedOperation]) -> Iterator[list[AgreedOperation]]:
    """Yield batches of successive operations that can be fused."""
    batch: list[AgreedOperation] = []
    size_bytes = 0
    for each in agreed:
        own_bytes = _size_bytes(each.any)
        fits = batch and each.fusion and each.fusion == batch[0].fusion and size_bytes + own_bytes <= FUSION_BYTES
        if batch and not fits:
            yield batch
            batch, size_bytes = [], 0
        batch.append(each)
        size_bytes += own_bytes
    if batch:
        yield batch


def _size_bytes(request: CollectiveRequest) -> int:
    dtype: torch.dtype = getattr(torch, request.dtype)
    return torch.Size(request.shape).numel() * dtype.itemsize


def _reduce(batch: Sequence[AgreedOperation], of: SetGroup) -> None:
    shares = [each.any.zeros() if each.mine is None else _scaled(each.mine) for each in batch]
    flat = torch.cat([share.reshape(-1) for share in shares])
    work = dist.all_reduce(flat, op=_REDUCTIONS[batch[0].any.op], group=of.group, async_op=True)
    parts = torch.split(flat, [share.numel() for share in shares])
    for each, part in zip(batch, parts, strict=True):
        if each.mine is not None:
            each.mine.works, each.mine.finish = [work], _reduced(each.mine, part, of)


def _scaled(mine: SubmittedOperation) -> torch.Tensor:
    return mine.tensor if mine.prescale == 1 else mine.tensor * mine.prescale


def _reduced(mine: SubmittedOperation, part: torch.Tensor, of: SetGroup) -> Callable[[], torch.Tensor]:
    def finish() -> torch.Tensor:
        result = _averaged(part, mine, len(of.ranks)).view(mine.request.shape)
        if mine.request.kind == "reducescatter":
            result = torch.split(result, rows_by_rank(mine.request.shape[0], len(of.ranks)))[of.own].clone()
        return _delivered(mine, result)

    return finish


def _averaged(part: torch.Tensor, mine: SubmittedOperation, size: int) -> torch.Tensor:
    """Return the sum, scaled and divided. Whole numbers are rounded down, as by Horovod."""
    if not part.is_floating_point() and not part.is_complex():
        scaled = part if mine.postscale == 1 else (part * mine.postscale).to(part.dtype)
        return scaled.floor_divide(size) if mine.request.op == "Average" else scaled
    factor = mine.postscale / size if mine.request.op == "Average" else mine.postscale
    return part if factor == 1 else part * factor


def _delivered(mine: SubmittedOperation, result: torch.Tensor) -> torch.Tensor:
    if mine.into is None:
        return result
    with torch.no_grad():
        return mine.into.copy_(result.view(mine.into.shape))


def rows_by_rank(rows: int, size: int) -> list[int]:
    """Return the number of rows that `reducescatter` gives each rank: the first ones have one more."""
    each, more = divmod(rows, size)
    return [each + (rank < more) for rank in range(size)]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as flat bytes, which can be sent whatever its data type."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _typed(data: torch.Tensor, request: CollectiveRequest, rows: int) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, request.dtype)
    return data.clone().view(dtype).view(rows, *request.shape[1:])


def _row_bytes(request: CollectiveRequest) -> int:
    dtype: torch.dtype = getattr(torch, request.dtype)
    return torch.Size(request.shape[1:]).numel() * dtype.itemsize


def _gather(agreed: AgreedOperation, mine: SubmittedOperation, of: SetGroup) -> None:
    rows = [agreed.requests[rank].shape[0] for rank in range(len(of.ranks))]
    row_bytes = _row_bytes(mine.request)
    sent = mine.tensor.new_zeros(max(rows) * row_bytes, dtype=torch.uint8)
    own = _bytes(mine.tensor)
    sent[: len(own)] = own
    parts = [torch.empty_like(sent) for _ in rows]

    def finish() -> torch.Tensor:
        whole = torch.cat([part[: count * row_bytes] for part, count in zip(parts, rows, strict=True)])
        return _typed(whole, mine.request, sum(rows))

    mine.works = [dist.all_gather(parts, sent, group=of.group, async_op=True)] if len(sent) else []
    mine.finish = finish


def _broadcast(agreed: AgreedOperation, mine: SubmittedOperation, of: SetGroup) -> None:
    data = _bytes(mine.tensor).clone()
    dtype = mine.tensor.dtype
    if len(data):
        mine.works = [dist.broadcast(data, src=mine.request.root, group=of.group, async_op=True)]
    mine.finish = lambda: _delivered(mine, data.view(dtype).view(mine.request.shape))


def _scatter_all(agreed: AgreedOperation, mine: SubmittedOperation, of: SetGroup) -> None:
    row_bytes = _row_bytes(mine.request)
    received = [agreed.requests[rank].splits[of.own] for rank in range(len(of.ranks))]
    data = mine.tensor.new_empty(sum(received) * row_bytes, dtype=torch.uint8)
    mine.works = [
        dist.all_to_all_single(
            data,
            _bytes(mine.tensor),
            [count * row_bytes for count in received],
            [count * row_bytes for count in mine.request.splits],
            group=of.group,
            async_op=True,
        )
    ]
    mine.finish = lambda: (_typed(data, mine.request, sum(received)), torch.tensor(received, dtype=torch.int32))


def _meet(agreed: AgreedOperation, mine: SubmittedOperation, of: SetGroup) -> None:
    mine.finish = lambda: None


_MOVES: dict[str, Callable[[AgreedOperation, SubmittedOperation, SetGroup], None]] = {
    "allgather": _gather,
    "broadcast": _broadcast,
    "alltoall": _scatter_all,
    "barrier": _meet,
}


def unjoinable(request: CollectiveRequest) -> str:
    """Return the error message if joined ranks cannot take part in an operation, else an empty text."""
    if request.kind == "allreduce" and request.op in {"Average", "Sum"}:
        return ""
    return (
        f"{request.kind} {request.name!r} needs all ranks, and some have called hvd.join(): only allreduce with "
        f"hvd.Average or hvd.Sum goes on without them."
    )
