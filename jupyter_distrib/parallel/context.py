"""Context parallelism: long sequences are split over the ranks, with attention over the whole sequence.

GPUs: torch's `torch.distributed.tensor.experimental.context_parallel`, which passes keys and values round in a ring.
CPUs: torch has no kernels for that, so keys and values are gathered; the numbers are the same, the memory is not saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from jupyter_distrib.errors import DistributedError


@contextmanager
def context_parallel(mesh: DeviceMesh, *tensors: torch.Tensor, dim: int = 1) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield this rank's part of each tensor along the sequence dimension `dim`; inside the block, attention by
    `torch.nn.functional.scaled_dot_product_attention` reaches over the parts of all ranks.

    Positions are needed, too: include the tensor from which the model adds them. Compute the loss and the backward pass
    inside, and average the gradients over the mesh afterwards (`average_gradients`).

    Args:
        mesh: The submesh along the sequence: `mesh["cp"]`.
        tensors: Tensors that are equal on all its ranks; they are not modified.
        dim: The dimension of the sequence in each.

    Raises:
        DistributedError: A sequence cannot be divided.
    """
    on_gpu = mesh.device_type != "cpu"
    parts = 2 * mesh.size() if on_gpu else mesh.size()  # on GPUs each rank has an early and a late part
    for each in tensors:
        if each.shape[dim] % parts:
            raise DistributedError(
                f"context_parallel divides a sequence into {parts} parts, and one has {each.shape[dim]} positions: pad "
                "it."
            )
    if on_gpu:
        with _by_torch(mesh, [each.clone() for each in tensors], dim) as own:
            yield own
        return
    number = mesh.get_local_rank()
    with _attention_over(mesh):
        yield tuple(each.chunk(mesh.size(), dim)[number].contiguous() for each in tensors)


@contextmanager
def _by_torch(mesh: DeviceMesh, buffers: list[torch.Tensor], dim: int) -> Iterator[tuple[torch.Tensor, ...]]:
    from torch.distributed.tensor.experimental import context_parallel as of_torch

    with of_torch(mesh, buffers=buffers, buffer_seq_dims=[dim] * len(buffers)):
        yield tuple(buffers)


@contextmanager
def _attention_over(mesh: DeviceMesh) -> Iterator[None]:
    original: Any = functional.scaled_dot_product_attention

    def attention(  # noqa: PLR0917 - torch's own signature
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **more: Any,
    ) -> torch.Tensor:
        if attn_mask is not None or dropout_p:
            raise DistributedError(
                "attention over a divided sequence takes neither attn_mask nor dropout_p, here as in torch's context "
                "parallelism: use is_causal, and dropout outside of the attention."
            )
        whole = [GatheredSequence.apply(each, mesh) for each in (key, value)]  # type: ignore[no-untyped-call]
        mask = _causal(query, mesh) if is_causal else None
        attended: torch.Tensor = original(query, *whole, attn_mask=mask, **more)
        return attended

    functional.scaled_dot_product_attention = attention  # type: ignore[assignment]
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = original


def _causal(query: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return a mask of the positions in the whole sequence that each position of this rank's part may attend to."""
    own = query.shape[-2]
    rows = torch.arange(own) + own * mesh.get_local_rank()
    return rows[:, None] >= torch.arange(own * mesh.size())[None]


class GatheredSequence(torch.autograd.Function):
    """Concatenates the parts of all ranks in order; the gradient of each part is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        ctx.mesh, ctx.own = mesh, part.shape[-2]
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(mesh.size())]
        dist.all_gather(parts, part.contiguous(), group=mesh.get_group())
        return torch.cat(parts, dim=-2)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        whole = gradients[0].contiguous().clone()
        dist.all_reduce(whole, group=ctx.mesh.get_group())
        return whole.narrow(-2, ctx.own * ctx.mesh.get_local_rank(), ctx.own), None
