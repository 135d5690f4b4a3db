"""The shapes and types of the tensors that stages of a pipeline hand to one another. Collective, in the main thread.

The ranks tell one another these as JSON. If torch is not given them, it exchanges them as pickles.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from jupyter_distrib.errors import DistributedError
from jupyter_distrib.worker.autoparallel import object_collectives

_Tensors = tuple[torch.Tensor, ...]


def examples(module: nn.Module, first: torch.Tensor, group: Any) -> tuple[_Tensors, _Tensors]:
    """Return tensors without content, like those that this rank's stage takes and gives. Buffers keep their values.

    Args:
        module: This rank's stage.
        first: The first part of the batch, on the device of the module; only the first stage reads it.
        group: The ranks of the stages, in their order.

    Raises:
        DistributedError: The stage gives something else than tensors.
    """
    stage, stages = dist.get_rank(group), dist.get_world_size(group)
    forms = [_form(first)]
    for turn in range(stage):
        forms = object_collectives.gather(None, group)[turn]
    taken = tuple(map(_made, forms))
    content = [torch.zeros_like(each, device=first.device).requires_grad_(each.requires_grad) for each in taken]
    given = [_form(tensor) for tensor in _given(module, content if stage else [first], stage)]
    for turn in range(stage, stages - 1):
        object_collectives.gather(given if turn == stage else None, group)
    return taken, tuple(map(_made, given))


def _given(module: nn.Module, taken: list[torch.Tensor], stage: int) -> _Tensors:
    kept = [buffer.clone() for buffer in module.buffers()]
    with torch.enable_grad():
        given = module(*taken)
    with torch.no_grad():
        for buffer, content in zip(module.buffers(), kept, strict=True):
            buffer.copy_(content)
    tensors = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    other = [type(each).__name__ for each in tensors if type(each) is not torch.Tensor]
    if other:
        raise DistributedError(
            f"Pipeline wants stages that return a tensor or a tuple of tensors; stage {stage} returned {other[0]}."
        )
    return tensors


def _form(tensor: torch.Tensor) -> list[Any]:
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), list(tensor.stride()), tensor.requires_grad]


def _made(form: list[Any]) -> torch.Tensor:
    name, shape, stride, requires_grad = form
    return torch.empty_strided(shape, stride, dtype=getattr(torch, name), device="meta", requires_grad=requires_grad)
