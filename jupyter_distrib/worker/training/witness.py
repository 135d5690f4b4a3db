"""Tells the user when ranks have trained apart: they end a run with different weights. Never waits for a rank.

Each rank leaves the sums of its weights in the store when its cell has ended, and looks for those of rank 0; rank 0
looks for those of all others. So whoever of two ranks comes later sees both. Sums are compared with a tolerance, since
ranks on unlike GPUs may drift apart in the last digits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import torch

from jupyter_distrib.worker.board import Board

RELATIVE = 1e-4


def differs(board: Board, rank: int, size: int, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a rank that has ended already holds other weights than this one."""
    mine = _sums(tensors)
    board.put(f"weights/{rank}", json.dumps(mine))
    others = range(1, size) if rank == 0 else (0,)
    found = [json.loads(board.get(key)) for key in map("weights/{}".format, others) if board.has([key])]
    return any(_apart(mine, theirs) for theirs in found)


def _sums(tensors: Sequence[torch.Tensor]) -> list[list[float]]:
    """Of each tensor its length, its sum and the sum of its absolute values."""
    with torch.no_grad():
        plain = [tensor.detach().double() for tensor in tensors if tensor.layout is torch.strided]
        sums = [torch.stack([each.sum(), each.abs().sum()]).cpu() for each in plain]
    return [[each.numel(), *both.tolist()] for each, both in zip(plain, sums, strict=True)]


def _apart(mine: list[list[float]], theirs: list[list[float]]) -> bool:
    if [each[0] for each in mine] != [each[0] for each in theirs]:
        return False  # not the same program on these ranks: nothing can be said
    return any(
        not math.isclose(a, b, rel_tol=RELATIVE, abs_tol=RELATIVE * (scale + 1e-12))
        for (_, total, scale), (_, other, other_scale) in zip(mine, theirs, strict=True)
        for a, b in ((total, other), (scale, other_scale))
        if math.isfinite(a) and math.isfinite(b)
    )
