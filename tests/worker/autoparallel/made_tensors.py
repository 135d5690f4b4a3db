"""Counts what torch makes and moves while a test runs."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class MadeTensors(TorchDispatchMode):
    """The sizes of all tensors that are made inside, views left out."""

    def __init__(self) -> None:
        super().__init__()
        self.largest_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not func.is_view:
            self.largest_bytes = max(self.largest_bytes, out.nbytes)
        return out
