"""Finds tensors that a cell trains by its own code beside a model that the ranks train together: nothing averages their
gradients, so each rank goes on with another value. A tensor that gets no more gradients after a while is none of these:
it is an input that the code changes by its gradient, such as a sample of an energy-based model or an adversarial
example. Rank's main thread; never waits for a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from weakref import ref

import torch

from jupyter_distrib.worker.autoparallel.checks import divergence, training_by_hand
from jupyter_distrib.worker.host_copy import is_capturing
from jupyter_distrib.worker.pytorch import private
from jupyter_distrib.worker.pytorch.rank_store import StoreBoard

LOOKS = 3
"""Number of backward passes whose graphs are followed to their leaves: several models may take turns."""
_STILL_TRAINED = 4
"""The part of all backward passes, 1/4, after which a tensor that is trained gets gradients at the latest."""


class OwnUpdates:
    """The leaves of one run's graphs that no distributed model owns.

    Args:
        keep: Called with these leaves, which may have no owner at the end of the cell.
    """

    def __init__(self, keep: Callable[..., None]) -> None:
        self._keep = keep
        self._looks = 0
        self._before: dict[int, tuple[ref[torch.Tensor], float]] = {}
        """These leaves by their `id`, with their sums before the first gradient."""
        self._states: dict[int, tuple[int, int, int]] = {}
        """Versions of each leaf and of its gradient, and the `id` of that: some of these change with every gradient."""
        self._last: dict[int, int] = {}
        """The number of the backward pass before which that was last seen to have changed."""

    def look(self, losses: Sequence[torch.Tensor], owned: Iterable[torch.Tensor]) -> None:
        """Look at a backward pass that is about to begin.

        Args:
            losses: The tensors from which it starts.
            owned: The parameters of the distributed models.
        """
        if (self._looks >= LOOKS and not self._before) or is_capturing():
            return
        self._looks += 1
        self._follow()
        if self._looks > LOOKS:
            return
        known = {id(each) for each in owned} | {key for key, (weak, _) in self._before.items() if weak() is not None}
        new = [
            each for each in training_by_hand.leaves_of(losses) if id(each) not in known and each.is_floating_point()
        ]
        for each, value in zip(new, training_by_hand.sums_of(new), strict=True):
            self._before[id(each)] = ref(each), value
        self._keep(*new)

    def _follow(self) -> None:
        for key, (weak, _) in self._before.items():
            if (leaf := weak()) is None or not leaf.is_leaf:
                continue
            gradient = leaf.grad
            state = private.version_of(leaf), id(gradient), 0 if gradient is None else private.version_of(gradient)
            if self._states.setdefault(key, state) != state:
                self._states[key], self._last[key] = state, self._looks

    def _is_input(self, key: int) -> bool:
        last = self._last.get(key)  # none if the code takes its gradients in a way that leaves no trace
        return last is not None and _STILL_TRAINED * last < self._looks

    def apart(self, board: StoreBoard, rank: int, size: int, trained: Iterable[torch.Tensor]) -> torch.Tensor | None:
        """Return such a tensor if these have changed and differ from those of a rank that has ended; else None.

        Args:
            board: The store.
            rank: This rank.
            size: The number of ranks.
            trained: The tensors that optimizers train.
        """
        known = {id(each) for each in trained}
        left = [(each, old) for weak, old in self._before.values() if (each := weak()) is not None]
        left = [(each, old) for each, old in left if id(each) not in known and not self._is_input(id(each))]
        now = training_by_hand.sums_of([each for each, _ in left])
        changed = [each for (each, old), value in zip(left, now, strict=True) if value != old]
        if not divergence.differs(board, rank, size, changed, key="own_updates") or not changed:
            return None
        return changed[0]
