"""Detects ranks that do not train together. Never waits for a rank.

One sign is that they end a run with different weights: each writes the sums of its weights to the store when its cell
has ended, and reads those of rank 0; rank 0 reads those of all others. So the later of two ranks sees both. Sums are
compared with a tolerance, since ranks on unlike GPUs may drift apart in the last digits.

The other sign is that they read the same batches: then the first losses are the same on all of them, or with dropout
the targets of these losses.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import torch

from jupyter_distrib.interfaces import identity
from jupyter_distrib.system import private_torch
from jupyter_distrib.worker.autoparallel.checks import tensor_sums
from jupyter_distrib.worker.host_copy import HostCopy, is_capturing
from jupyter_distrib.worker.pytorch import process_group
from jupyter_distrib.worker.pytorch.rank_store import StoreBoard

RELATIVE = 1e-4
LOSSES = 3
"""Number of losses to compare: the first ones may not depend on the batch, for instance if a layer starts with
zeros."""
_NODES = 8
"""Number of operations behind a loss that are searched for its target."""
_ELEMENTS = 4096
"""Number of elements of a target that are compared."""
_LOSS_TYPES = (torch.float32, torch.float64)
DEVICE_ERROR: Any = getattr(torch, "AcceleratorError", ())
"""The error of a device that has failed earlier in the cell's own work; in torch since 2.8."""


def differs(
    board: StoreBoard, rank: int, size: int, tensors: Sequence[torch.Tensor], *, key: str = "weights"
) -> bool | None:
    """Return whether a rank that has already ended has different weights from this one; None if no difference is known
    yet, because other ranks have not ended. `key` is the name of these weights in the store."""
    own_sums = _sums(tensors)
    other_sums = published(board, key, rank, size, own_sums)
    if any(_apart(own_sums, other) for other in other_sums.values()):
        return True
    return False if len(other_sums) == size else None


def published(board: StoreBoard, key: str, rank: int, size: int, own: Any) -> dict[int, Any]:
    """Write a value of this rank to the store. Return the values of all ranks by rank, if all have written one; else
    rank 0's or, on rank 0, the values written so far."""
    board.put(f"{key}/{rank}", json.dumps(own))
    keys = [f"{key}/{each}" for each in range(size)]
    complete = board.has(keys)
    others = range(size) if complete or rank == 0 else range(1)
    return {each: json.loads(board.get(keys[each])) for each in others if complete or board.has([keys[each]])}


class LossComparison:
    """The first losses of a run on every rank, read once the device has computed them."""

    def __init__(self) -> None:
        self._mine: list[HostCopy] = []
        self._targets: list[HostCopy] = []
        """The targets of these losses, if their graphs have saved them."""
        self._open = True
        """Whether the comparison is undecided."""
        self._published = False

    def before(self, tensors: Sequence[torch.Tensor]) -> None:
        """Record the loss from which a backward pass starts."""
        if len(self._mine) == LOSSES or not self._open:
            return
        if is_capturing() or len(tensors) != 1 or tensors[0].numel() != 1 or tensors[0].dtype not in _LOSS_TYPES:
            self._open = False
            return
        self._mine.append(HostCopy(tensors[0]))
        if (target := _target(tensors[0].grad_fn)) is not None:
            self._targets.append(HostCopy(target))

    def publish(self, wait_s: float = 0.0) -> None:
        """Write the losses to the store for rank 0, once they have arrived on the host."""
        board = process_group.current.board()
        if self._published or board is None or len(self._mine) < LOSSES:
            return
        if all(each.has_come(wait_s) for each in (*self._mine, *self._targets)):
            self._published = True
            losses, targets = [float(each.read()) for each in self._mine], [each.read() for each in self._targets]
            distinct = len(targets) == LOSSES and all(map(_tells_batches_apart, targets))
            sums = [float(each.double().dot(_weights(len(each)))) for each in targets] if distinct else []
            board.put(_losses_of(identity.rank()), json.dumps([losses, sums]))

    def are_the_same(self) -> str:
        """Return which numbers are known to be equal on all ranks, `losses` or `targets of the first losses`; on rank 0
        only, and at most once."""
        if not self._open or identity.rank() != 0 or not self._published:
            return ""
        keys = [_losses_of(rank) for rank in range(identity.world_size())]
        board = process_group.current.board()
        if len(keys) == 1 or board is None or not board.has(keys):
            return ""
        self._open = False
        losses, targets = zip(*(json.loads(board.get(key)) for key in keys), strict=True)
        if all(each == losses[0] for each in losses):
            return f"the first {LOSSES} losses"
        alike = targets[0] and all(each == targets[0] for each in targets)
        return f"the targets of the first {LOSSES} losses" if alike else ""


def _target(node: Any) -> torch.Tensor | None:
    """Return the beginning of the target that a loss was computed with, if its graph has it."""
    for _ in range(_NODES):
        if node is None:
            return None
        if (target := private_torch.saved_target(node)) is not None:
            beginning: torch.Tensor = target.detach().flatten()[:_ELEMENTS]
            return beginning
        following = [each for each, _ in node.next_functions if each is not None]
        node = following[0] if following else None
    return None


def _tells_batches_apart(target: torch.Tensor) -> bool:
    """Return whether targets are those of certain samples, not a pattern that all batches have: ones, `arange(8)` or
    the unit matrix of contrastive losses, the classes of an episode in turn."""
    target = target.double()
    again = (target[1:] == target[0]).nonzero()
    period = int(again[0]) + 1 if len(again) else len(target)
    is_periodic = 2 * period <= len(target) and bool((target[period:] == target[:-period]).all())
    return len(set(target.diff().tolist())) > 2 and not is_periodic  # more than steps and jumps


def _weights(count: int) -> torch.Tensor:
    return torch.arange(1, count + 1, dtype=torch.float64).sqrt()


def _losses_of(rank: int) -> str:
    return f"losses/{rank}"


def _sums(tensors: Sequence[torch.Tensor]) -> list[list[float]]:
    """Return the length, the sum and the sum of absolute values of each tensor."""
    plain = [tensor for tensor in tensors if tensor_sums.is_plain(tensor)]
    return [[each.numel(), *both] for each, both in zip(plain, tensor_sums.magnitudes(plain), strict=True)]


def _apart(own_sums: list[list[float]], other_sums: list[list[float]]) -> bool:
    if [each[0] for each in own_sums] != [each[0] for each in other_sums]:
        return False  # not the same program on these ranks: no comparison is possible
    # A device that computes wrongly may give a negative sum of absolute values.
    return any(
        not math.isclose(a, b, rel_tol=RELATIVE, abs_tol=RELATIVE * (abs(scale) + 1e-12))
        for (_, total, scale), (_, other, other_scale) in zip(own_sums, other_sums, strict=True)
        for a, b in ((total, other), (scale, other_scale))
        if math.isfinite(a) and math.isfinite(b)
    )
