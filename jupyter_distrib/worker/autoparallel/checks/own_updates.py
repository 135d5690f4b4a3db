"""Finds tensors that the cell updates itself, outside the distributed model. Their gradients are not averaged, so they
diverge between ranks. A tensor that gets no more gradients after a while is none of these: it is an input that the code
changes by its gradient, such as a sample of an energy-based model or an adversarial example. Rank's main thread; never
waits for a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from weakref import ref

import torch

from jupyter_distrib.worker.autoparallel.checks import divergence, manual_training
from jupyter_distrib.worker.host_copy import is_capturing
from jupyter_distrib.worker.pytorch import private
from jupyter_distrib.worker.pytorch.rank_store import StoreBoard

GRADIENTS = 3
"""Number of backward passes whose graphs are followed to their leaves: several models may take turns."""
_STILL_TRAINED = 4
"""A trained tensor gets gradients at the latest after this part of all backward passes: 1/4."""


class OwnUpdates:
    """The leaves of one run's graphs that no distributed model owns.

    Args:
        keep: Called with these leaves, which may have no owner at the end of the cell.
    """

    def __init__(self, keep: Callable[..., None]) -> None:
        self._keep = keep
        self._gradients = 0
        self._before: dict[int, tuple[ref[torch.Tensor], float]] = {}
        """These leaves by their `id`, with their sums before the first gradient."""
        self._states: dict[int, tuple[int, int, int]] = {}
        """Versions of each leaf and of its gradient, and the gradient's `id`: some of these change with every
        gradient."""
        self._last: dict[int, int] = {}
        """The number of the backward pass before which these were last seen to have changed."""

    def record_leaves(self, losses: Sequence[torch.Tensor], owned: Iterable[torch.Tensor]) -> None:
        """Record the new leaves of a backward pass that is about to begin.

        Args:
            losses: The tensors from which it starts.
            owned: The parameters of the distributed models.
        """
        if (self._gradients >= GRADIENTS and not self._before) or is_capturing():
            return
        self._gradients += 1
        self._follow()
        if self._gradients > GRADIENTS:
            return
        known = {id(each) for each in owned} | {key for key, (weak, _) in self._before.items() if weak() is not None}
        new = [each for each in manual_training.leaves_of(losses) if id(each) not in known and each.is_floating_point()]
        for each, value in zip(new, manual_training.sums_of(new), strict=True):
            self._before[id(each)] = ref(each), value
        self._keep(*new)

    def _follow(self) -> None:
        for key, (weak, _) in self._before.items():
            if (leaf := weak()) is None or not leaf.is_leaf:
                continue
            gradient = leaf.grad
            state = private.version_of(leaf), id(gradient), 0 if gradient is None else private.version_of(gradient)
            if self._states.setdefault(key, state) != state:
                self._states[key], self._last[key] = state, self._gradients

    def _is_input(self, key: int) -> bool:
        last = self._last.get(key)  # none if the code takes its gradients in a way that leaves no trace
        return last is not None and _STILL_TRAINED * last < self._gradients

    def apart(self, board: StoreBoard, rank: int, size: int, trained: Iterable[torch.Tensor]) -> torch.Tensor | None:
        """Return a tensor that the cell has updated itself and that differs from its values on a rank that has ended;
        None if there is none.

        Args:
            board: The store.
            rank: This rank.
            size: The number of ranks.
            trained: The tensors that optimizers train.
        """
        known = {id(each) for each in trained}
        left = [(each, old) for weak, old in self._before.values() if (each := weak()) is not None]
        left = [(each, old) for each, old in left if id(each) not in known and not self._is_input(id(each))]
        now = manual_training.sums_of([each for each, _ in left])
        changed = [each for (each, old), value in zip(left, now, strict=True) if value != old]
        if not divergence.differs(board, rank, size, changed, key="own_updates") or not changed:
            return None
        return changed[0]
