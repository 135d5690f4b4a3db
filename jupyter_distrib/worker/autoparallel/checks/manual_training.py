"""Notices training that no optimizer of torch.optim does: leaves of the graph whose values change from one gradient to
the next, by `p.data -= ...`, in a function, as bare tensors, or made anew by a functional update. Rank's main thread.

It looks at the first gradients of a run only, and only while no model is spread over the ranks, so that other training
costs nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import ref

import torch

from jupyter_distrib.worker.host_copy import is_capturing
from jupyter_distrib.worker.pytorch.rank_store import StoreBoard

GRADIENTS = 20
"""Number of gradients to check: a step may accumulate several."""
_COMPARED = 3
"""Number of losses to compare between ranks."""
_NODES = 20_000
"""Maximum number of operations of a graph to follow to its leaves."""
_ELEMENTS = 4096
"""Number of elements of a leaf that are summed: an update changes more than a few."""
_RELATIVE = 1e-5

_Seen = tuple[ref[torch.Tensor], tuple[int, ...], float]
"""A leaf, its shape and its sum."""


class ManualTraining:
    """The changes that one run has made by itself between its gradients."""

    def __init__(self) -> None:
        self.found = False
        """Whether a leaf has changed."""
        self._gradients = 0
        self._losses: list[float] = []
        self._before: list[_Seen] = []

    def check_gradient(self, losses: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor] | None = None) -> None:
        """Check a gradient that is about to be computed.

        Args:
            losses: The tensors whose gradient is computed.
            inputs: The tensors for which it is computed, if given; else the leaves of the graph.
        """
        if self._gradients >= GRADIENTS or (self.found and len(self._losses) >= _COMPARED) or is_capturing():
            return
        self._gradients += 1
        plain = [each for each in map(_plain, losses) if each is not None]
        leaves = (
            list(leaves_of(losses)) if inputs is None else [each for each in map(_plain, inputs) if each is not None]
        )
        if len(self._losses) < _COMPARED and plain:
            self._losses.append(sums_of(plain[:1])[0])
        self._compare(leaves)

    def check_last_gradient(self) -> None:
        """Check whether the last gradient was used, for the leaves that still exist."""
        if self._before and not self.found and not is_capturing():
            alive = [each for weak, *_ in self._before if (each := weak()) is not None]
            self._compare(alive)

    def are_the_same(self, board: StoreBoard, rank: int, size: int) -> bool | None:
        """Return whether all ranks had the same losses; None on ranks that end before others."""
        board.put(f"manual_training/{rank}", json.dumps(self._losses))
        keys = [f"manual_training/{each}" for each in range(size)]
        if not board.has(keys):
            return None
        of_all = [json.loads(board.get(key)) for key in keys]
        return all(_alike(self._losses, each) for each in of_all)

    def _compare(self, leaves: list[torch.Tensor]) -> None:
        sums = sums_of(leaves)
        now: list[_Seen] = [(ref(each), tuple(each.shape), value) for each, value in zip(leaves, sums, strict=True)]
        known = {id(weak()): value for weak, _, value in self._before if weak() is not None}
        self.found = self.found or any(
            id(each) in known and known[id(each)] != value for each, value in zip(leaves, sums, strict=True)
        )
        same_form = len(now) > 1 and [shape for _, shape, _ in now] == [shape for _, shape, _ in self._before]
        if same_form and not any(id(each) in known for each in leaves):  # all made anew, as a functional update does
            self.found = self.found or all(a[2] != b[2] for a, b in zip(now, self._before, strict=True))
        self._before = now


def _plain(tensor: Any) -> torch.Tensor | None:
    """Return a tensor whose values can be read; None for tensors inside some transformations, such as `vmap`."""
    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or tensor.device.type == "meta":
        return None
    return tensor


def leaves_of(losses: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the leaves of a graph, in the order in which they are met."""
    edge: list[Any] = [each.grad_fn for each in losses if each.grad_fn is not None]
    seen = set(edge)
    while edge and len(seen) < _NODES:
        node = edge.pop()
        if (variable := getattr(node, "variable", None)) is not None and type(variable) in _WATCHABLE:
            yield variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                edge.append(following)


_WATCHABLE = (torch.Tensor, torch.nn.Parameter)


def sums_of(tensors: Sequence[torch.Tensor]) -> list[float]:
    """Return the sum of the beginning of each tensor."""
    with torch.no_grad():
        return [float(each.detach().flatten()[:_ELEMENTS].double().sum()) for each in tensors]


def _alike(one: list[float], other: list[float]) -> bool:
    if len(one) != len(other):
        return False
    return all(
        math.isclose(a, b, rel_tol=_RELATIVE, abs_tol=_RELATIVE) or not math.isfinite(a + b)
        for a, b in zip(one, other, strict=True)
    )
