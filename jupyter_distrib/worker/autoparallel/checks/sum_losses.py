"""Finds losses that are sums over a batch, by their graphs. Rank's main thread."""

from __future__ import annotations

import math
from typing import Any

import torch

from jupyter_distrib.system import private_torch

_SUM = 2
"""torch's number for `reduction="sum"` (at::Reduction), which its losses save."""
_SCALED = ("MulBackward", "DivBackward", "AddBackward", "SubBackward", "RsubBackward", "ToCopyBackward", "NegBackward")
"""Operations that do not change whether a loss is a sum: scaling, a further term, a type conversion."""
_DEPTH = 8
_NUMBERS = (torch.int64, torch.float64)
"""The types in which torch saves a Python number."""


def is_sum_loss(loss: torch.Tensor, *, samples: int | None, ranks: int) -> bool:
    """Return whether a loss is a sum over a batch that is not divided by a count in this rank's part of it.

    Args:
        loss: The loss.
        samples: The number of samples in this rank's part of the batch, if known.
        ranks: The number of ranks that share the batch.
    """
    return _is_sum(loss.grad_fn, samples, ranks, _DEPTH, None)


def _is_sum(node: Any, samples: int | None, ranks: int, depth: int, divisor: torch.Tensor | None) -> bool:
    if node is None or depth == 0:
        return False
    name = type(node).__name__
    if name.startswith(_SCALED):
        if name.startswith("DivBackward"):
            divisor = private_torch.saved_divisor(node)
        return any(_is_sum(each, samples, ranks, depth - 1, divisor) for each, _ in node.next_functions)
    if private_torch.saved_reduction(node) == _SUM:
        target = private_torch.saved_target(node)
        return not _is_counted(divisor, samples, ranks, None if target is None else target.numel())
    sizes = private_torch.summed_sizes(node) if name.startswith("SumBackward") else None
    if sizes is None or _is_of_parameters(node):
        return False
    if samples and not any(size % samples == 0 for size in (*sizes, *_selected_from(node))):
        return False  # a sum over tasks or layers
    return not _is_counted(divisor, samples, ranks, math.prod(sizes))


def _selected_from(node: Any) -> tuple[int, ...]:
    """Return the shape from which a sum has selected what it adds up, as in `losses[mask].sum()`; else nothing."""
    for _ in range(_DEPTH):
        node = next((each for each, _ in node.next_functions if each is not None), None)
        name = type(node).__name__
        if name.startswith("Index"):
            return private_torch.summed_sizes(node) or ()
        if not name.startswith(_SCALED):
            break
    return ()


def _is_counted(divisor: torch.Tensor | None, samples: int | None, ranks: int, elements: int | None) -> bool:
    """Return whether a divisor is counted in this rank's part of the batch, as `mask.sum()` or `len(x)` is."""
    if divisor is None or divisor.numel() != 1:
        return False
    if divisor.dtype not in _NUMBERS or divisor.device.type != "cpu":
        return True
    number = divisor.item()
    return number == samples or (number == elements and number != (samples or 0) * ranks)


def _is_of_parameters(node: Any) -> bool:
    """Return whether a sum does not depend on a batch, as in a penalty: `p.abs().sum()`."""
    for _ in range(_DEPTH):
        following = [each for each, _ in node.next_functions if each is not None]
        if len(following) != 1:
            return False
        node = following[0]
        if isinstance(getattr(node, "variable", None), torch.nn.Parameter):
            return True
    return False
