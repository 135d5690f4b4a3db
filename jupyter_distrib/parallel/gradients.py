"""Averages gradients along a dimension of a mesh, for cells that distribute a model themselves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def average_gradients(parameters: Iterable[torch.nn.Parameter], mesh: DeviceMesh) -> None:
    """Average the gradients over the ranks of a one-dimensional mesh, in one collective per data type."""
    by_type: dict[Any, list[torch.Tensor]] = {}
    for each in parameters:
        if each.requires_grad:
            each.grad = torch.zeros_like(each) if each.grad is None else each.grad
            by_type.setdefault(each.dtype, []).append(each.grad)
    for grads in by_type.values():
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(flat, group=mesh.get_group())
        flat /= mesh.size()
        for grad, part in zip(grads, torch.split(flat, [grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad))
