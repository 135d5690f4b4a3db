"""Finds optimizers that have made another number of steps on one rank than on another, or go on with another learning
rate, as where each rank decides by its own share of the data. Rank's main thread; never waits for a rank."""

from __future__ import annotations

import math
from dataclasses import dataclass
from weakref import WeakKeyDictionary, ref

import torch
from torch.optim import Optimizer

from jupyter_distrib.worker.autoparallel.checks import divergence
from jupyter_distrib.worker.pytorch.rank_store import StoreBoard

_RELATIVE = 1e-6
_OPTIMIZERS = 100
"""Number of optimizers, in the order of their first steps, whose steps are counted."""
_Made = tuple[str, int, list[float], list[float]]
"""The class of an optimizer, the number of its steps, its learning rates before the first one, and those at the end, if
it still exists."""


@dataclass(slots=True)
class _Steps:
    """The steps of one optimizer."""

    name: str
    optimizer: ref[Optimizer]
    first: list[float]
    """Its learning rates before the first step, unless they are tensors, which a device would have to send."""
    count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A difference between the steps of two ranks."""

    text: str
    """The difference in a sentence."""
    from_first: bool
    """Whether the ranks differed before the optimizer's first step; by now it may be gone with its model."""


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
            first = [float(each) for each in _raw_rates(optimizer) if isinstance(each, int | float)]
            steps = _Steps(name=type(optimizer).__name__, optimizer=ref(optimizer), first=first)
            self._of[optimizer] = steps
            self._all.append(steps)
        steps.count += 1

    def difference(self, board: StoreBoard, rank: int, size: int) -> Difference | None:
        """Return what differs between this rank and one that has ended its cell; None if nothing is known to differ."""
        own: list[_Made] = [
            (each.name, each.count, each.first, list(map(float, _raw_rates(each.optimizer())))) for each in self._all
        ]
        for other, made in divergence.published(board, "steps", rank, size, own).items():
            if other != rank and len(made) == len(own):
                for one, another in zip(own, made, strict=True):
                    if found := _differing(one, another, rank, other):
                        return found
        return None


def _raw_rates(optimizer: Optimizer | None) -> list[float | torch.Tensor]:
    groups = [] if optimizer is None else optimizer.param_groups
    return [group["lr"] for group in groups if "lr" in group]


def _differing(one: _Made, other: _Made, rank: int, other_rank: int) -> Difference | None:
    (name, count, first, rates), (other_name, other_count, other_first, other_rates) = one, other
    if name != other_name:
        return None  # not the same program on these ranks: no comparison is possible
    if apart := _rates_apart(first, other_first, rank, other_rank):
        return Difference(text=f"{name} has begun with a learning rate of {apart}", from_first=True)
    pair = sorted([(rank, count), (other_rank, other_count)])
    if count != other_count:
        (low, few), (high, many) = pair
        return Difference(text=f"{name} has made {few} steps on rank {low} and {many} on rank {high}", from_first=False)
    if apart := _rates_apart(rates, other_rates, rank, other_rank):
        return Difference(text=f"{name} has a learning rate of {apart}", from_first=False)
    return None


def _rates_apart(rates: list[float], other_rates: list[float], rank: int, other_rank: int) -> str:
    for rate, other_rate in zip(rates, other_rates, strict=False):
        both_nan = math.isnan(rate) and math.isnan(other_rate)
        if not both_nan and not math.isclose(rate, other_rate, rel_tol=_RELATIVE):
            (low, small), (high, large) = sorted([(rank, rate), (other_rank, other_rate)])
            return f"{small:g} on rank {low} and {large:g} on rank {high}"
    return ""
