"""Gives the cell numbers for whole tensors where it computes with shards, for the duration of a run. Runs on each rank.

`parameter.grad.norm()` of a sharded parameter is a `DTensor` that still has to be summed over the ranks, and torch
(2.13) computes `.item()`, `float()` and `bool()` from this rank's part alone, without a warning: a logged norm is
too small, and `if grad.isnan().any()` may decide differently on each rank. Here these methods sum over the ranks
first, so every rank has to call them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from jupyter_distrib.worker.autoparallel.patches import Patches

_ASK = ("item", "__bool__", "__float__", "__int__", "__index__", "__complex__")
"""The methods that turn a tensor into a Python number."""


def install(patches: Patches) -> None:
    for name in _ASK:
        patches.replace(DTensor, name, _of_all_ranks)
    patches.replace(DTensor, "__format__", _formatted)


def _of_all_ranks(original: Callable[..., Any]) -> Callable[..., Any]:
    def ask(tensor: torch.Tensor, *args: Any) -> Any:
        return original(_whole(tensor), *args)

    return ask


def _formatted(original: Callable[..., str]) -> Callable[..., str]:
    def in_words(tensor: torch.Tensor, form: str) -> str:
        return format(tensor.item(), form) if form and tensor.ndim == 0 else original(tensor, form)

    return in_words


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor) or tensor.numel() != 1:
        return tensor
    with torch.no_grad():
        return tensor.full_tensor().detach()
