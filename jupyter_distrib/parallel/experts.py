"""Expert parallelism: the experts of a layer are on different ranks, and tokens are sent to the rank of their expert
and back. torch provides the exchange (`all_to_all_single`), on GPUs and CPUs, but no layer that uses it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from jupyter_distrib.errors import DistributedError
from jupyter_distrib.parallel.gradients import average_gradients


class Experts(nn.Module):
    """The experts of one layer, of which this rank keeps its part. Every rank calls it with its own tokens.

    Args:
        mesh: A mesh with a dimension `ep`, as the cell finds it.
        experts: All experts of the layer; each maps tokens to tokens of the same size.

    Raises:
        DistributedError: There is no such dimension, or the experts cannot be divided.
    """

    def __init__(self, mesh: DeviceMesh, experts: Sequence[nn.Module]) -> None:
        super().__init__()
        names = mesh.mesh_dim_names or ()
        if "ep" not in names:
            raise DistributedError(
                f"Experts needs a mesh with a dimension ep, such as --mesh ep=2; this one has {', '.join(names)}."
            )
        self._along = mesh["ep"]
        if not experts or len(experts) % self._along.size():
            raise DistributedError(
                f"Experts was given {len(experts)} experts, which {self._along.size()} ranks along ep cannot divide "
                "evenly: give a multiple."
            )
        self.count, self.own = len(experts), len(experts) // self._along.size()
        first = self.own * self._along.get_local_rank()
        self.experts = nn.ModuleDict({str(number): experts[number] for number in range(first, first + self.own)})
        if "data" in names:  # the ranks with the same experts begin alike
            for each in self.experts.state_dict().values():
                dist.broadcast(each, group=mesh["data"].get_group(), group_src=0)

    def forward(self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return for each token the weighted sum of its experts' outputs. Collective along `ep`.

        Args:
            tokens: Of shape (tokens, size).
            chosen: Indices of each token's experts, of shape (tokens, experts of a token), as from `topk`.
            weights: Their weights, of the same shape.
        """
        if chosen.shape != weights.shape or chosen.dim() != 2 or len(chosen) != len(tokens):
            raise DistributedError(
                "Experts needs chosen and weights of shape (tokens, experts of a token); there are "
                f"{len(tokens)} tokens, and the shapes are {tuple(chosen.shape)} and {tuple(weights.shape)}."
            )
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=self.count)
        if len(counts) > self.count:
            raise DistributedError(f"Experts has {self.count} experts, and number {len(counts) - 1} was chosen.")
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self._along.get_group())
        out = counts.view(-1, self.own).sum(1).tolist()
        back = arriving.view(-1, self.own).sum(1).tolist()
        spread = tokens.repeat_interleave(chosen.shape[1], dim=0)[order]
        came = _Exchanged.apply(spread, back, out, self._along)  # type: ignore[no-untyped-call]
        made = _Exchanged.apply(self._computed(came, arriving), out, back, self._along)  # type: ignore[no-untyped-call]
        sorted_back = torch.zeros_like(made).index_copy(0, order, made)
        return (sorted_back.view(*chosen.shape, -1) * weights.unsqueeze(-1)).sum(1)

    def _computed(self, tokens: torch.Tensor, arriving: torch.Tensor) -> torch.Tensor:
        """Return the outputs of this rank's experts for the tokens, which are ordered by rank and then by expert."""
        parts = list(torch.split(tokens, arriving.tolist()))
        for number, expert in enumerate(self.experts.values()):
            own = parts[number :: self.own]
            parts[number :: self.own] = torch.split(expert(torch.cat(own)), [len(each) for each in own])
        return torch.cat(parts)


def average_expert_gradients(model: nn.Module, mesh: DeviceMesh) -> None:
    """Scale the gradients to those of the mean loss over all ranks, after the backward pass: an expert already has
    the gradients of all its tokens, and the gradients of all other parameters are averaged over the ranks."""
    layers = [each for each in model.modules() if isinstance(each, Experts)]
    of_experts = list({id(one): one for layer in layers for one in layer.parameters()}.values())
    own = {id(one) for one in of_experts}
    others = [each for each in model.parameters() if id(each) not in own]
    average_gradients(others, mesh["ep"])
    for one in of_experts:
        one.grad = torch.zeros_like(one) if one.grad is None else one.grad / mesh["ep"].size()
    if "data" in (mesh.mesh_dim_names or ()):
        average_gradients([*others, *of_experts], mesh["data"])


class _Exchanged(torch.autograd.Function):
    """Exchanges rows between ranks; gradients take the reverse way."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, came: list[int], went: list[int], mesh: DeviceMesh) -> torch.Tensor:
        ctx.came, ctx.went, ctx.mesh = came, went, mesh
        return _exchange(rows, came, went, mesh)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _exchange(gradients[0], ctx.went, ctx.came, ctx.mesh), None, None, None


def _exchange(rows: torch.Tensor, came: list[int], went: list[int], mesh: DeviceMesh) -> torch.Tensor:
    received = rows.new_empty((sum(came), *rows.shape[1:]))
    dist.all_to_all_single(received, rows.contiguous(), came, went, group=mesh.get_group())
    return received
