"""The check whether a loss is a sum over a batch or a mean, by its graph. Rank's main thread."""

from __future__ import annotations

from typing import Any

import torch

from jupyter_distrib.system import private_torch

_SUM = 2
"""torch's number for `reduction="sum"` (at::Reduction), which its losses save."""
_SCALED = ("MulBackward", "DivBackward", "AddBackward", "ToCopyBackward", "NegBackward")
"""The operations behind a loss that keep its kind: a scale, a penalty, another type."""
_DEPTH = 8


def is_sum(loss: torch.Tensor) -> bool:
    """Return whether a loss is a sum over a batch."""
    return _is_sum(loss.grad_fn, _DEPTH)


def _is_sum(node: Any, depth: int) -> bool:
    if node is None or depth == 0:
        return False
    name = type(node).__name__
    if name.startswith(_SCALED):
        return any(_is_sum(each, depth - 1) for each, _ in node.next_functions)
    return name.startswith("SumBackward") or private_torch.saved_reduction(node) == _SUM
