"""Finds optimizers that have made another number of steps on one rank than on another, or go on with another learning
rate, as where each rank decides by its own share of the data. Rank's main thread; never waits for a rank."""

from __future__ import annotations

import math
from dataclasses import dataclass
from weakref import WeakKeyDictionary, ref

from torch.optim import Optimizer

from jupyter_distrib.worker.autoparallel.checks import divergence
from jupyter_distrib.worker.pytorch.rank_store import StoreBoard

_RELATIVE = 1e-6
_OPTIMIZERS = 100
"""Number of optimizers, in the order of their first steps, whose steps are counted."""
_Made = tuple[str, int, list[float]]
"""The class of an optimizer, the number of its steps, and its learning rates, if it still exists."""


@dataclass(slots=True)
class _Steps:
    """The steps of one optimizer."""

    name: str
    optimizer: ref[Optimizer]
    count: int = 0


class StepCounts:
    """The steps of one run."""

    def __init__(self) -> None:
        self._all: list[_Steps] = []
        self._of: WeakKeyDictionary[Optimizer, _Steps] = WeakKeyDictionary()

    def add(self, optimizer: Optimizer) -> None:
        """Count a step."""
        if (steps := self._of.get(optimizer)) is None:
            if len(self._all) == _OPTIMIZERS:
                return
            steps = self._of[optimizer] = _Steps(name=type(optimizer).__name__, optimizer=ref(optimizer))
            self._all.append(steps)
        steps.count += 1

    def difference(self, board: StoreBoard, rank: int, size: int) -> str:
        """Return what differs between this rank and one that has ended its cell, as a sentence; empty if nothing is
        known to differ."""
        own: list[_Made] = [(each.name, each.count, _rates(each.optimizer())) for each in self._all]
        for other, made in divergence.published(board, "steps", rank, size, own).items():
            if other != rank and len(made) == len(own):
                for one, another in zip(own, made, strict=True):
                    if told := _differing(one, another, rank, other):
                        return told
        return ""


def _rates(optimizer: Optimizer | None) -> list[float]:
    groups = [] if optimizer is None else optimizer.param_groups
    return [float(group["lr"]) for group in groups if "lr" in group]


def _differing(one: _Made, other: _Made, rank: int, other_rank: int) -> str:
    (name, count, rates), (other_name, other_count, other_rates) = one, other
    if name != other_name:
        return ""  # not the same program on these ranks: no comparison is possible
    pair = sorted([(rank, count), (other_rank, other_count)])
    if count != other_count:
        (low, few), (high, many) = pair
        return f"{name} has made {few} steps on rank {low} and {many} on rank {high}"
    for rate, other_rate in zip(rates, other_rates, strict=False):
        if not math.isclose(rate, other_rate, rel_tol=_RELATIVE):
            (low, small), (high, large) = sorted([(rank, rate), (other_rank, other_rate)])
            return f"{name} has a learning rate of {small:g} on rank {low} and {large:g} on rank {high}"
    return ""
