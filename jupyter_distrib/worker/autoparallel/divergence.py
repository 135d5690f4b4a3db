"""Finds out when ranks do not train together. Never waits for a rank.

They end a run with different weights: each leaves the sums of its weights in the store when its cell has ended, and
looks for those of rank 0; rank 0 looks for those of all others. So whoever of two ranks comes later sees both. Sums are
compared with a tolerance, since ranks on unlike GPUs may drift apart in the last digits.

They read the same batches: then the first losses are the same on all of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import torch

from jupyter_distrib.worker import identity, process_group
from jupyter_distrib.worker.store_board import StoreBoard

RELATIVE = 1e-4
LOSSES = 3
"""Of a layer that begins with zeros, say, the first ones say nothing of the batch."""


def differs(board: StoreBoard, rank: int, size: int, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a rank that has ended already holds other weights than this one."""
    mine = _sums(tensors)
    board.put(f"weights/{rank}", json.dumps(mine))
    others = range(1, size) if rank == 0 else (0,)
    found = [json.loads(board.get(key)) for key in map("weights/{}".format, others) if board.has([key])]
    return any(_apart(mine, theirs) for theirs in found)


class LossComparison:
    """The first losses of a run, on every rank."""

    def __init__(self) -> None:
        self._mine: list[float] = []
        self._open = True
        """Nothing is known yet."""

    def before(self, tensors: Sequence[torch.Tensor]) -> None:
        """Called with what a backward pass begins at."""
        if len(self._mine) == LOSSES:
            return
        if len(tensors) != 1 or tensors[0].numel() != 1 or tensors[0].dtype not in (torch.float32, torch.float64):
            self._open = False
            return
        self._mine.append(float(tensors[0].detach()))
        board = process_group.current.board()
        if len(self._mine) == LOSSES and board is not None:
            board.put(_losses_of(identity.rank()), json.dumps(self._mine))

    def are_the_same(self) -> bool:
        """Whether all ranks have had the same losses, as far as rank 0 can know by now. True once at most."""
        if not self._open or identity.rank() != 0 or len(self._mine) < LOSSES:
            return False
        keys = [_losses_of(rank) for rank in range(identity.world_size())]
        board = process_group.current.board()
        if len(keys) == 1 or board is None or not board.has(keys):
            return False
        self._open = False
        return len({board.get(key) for key in keys}) == 1


def _losses_of(rank: int) -> str:
    return f"losses/{rank}"


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
