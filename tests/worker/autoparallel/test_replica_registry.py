"""Which replicas a run has: they end with their optimizers."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from jupyter_distrib.worker.autoparallel.training.gradient_reducer import GradientReducer, ReplicaRegistry


def trained() -> tuple[torch.optim.Optimizer, GradientReducer]:
    model = nn.Linear(2, 1)
    return torch.optim.SGD(model.parameters(), lr=0.1), GradientReducer([model], [])


def test_a_reducer_ends_with_its_optimizer_and_frees_the_model() -> None:
    registry = ReplicaRegistry()
    optimizer, reducer = trained()
    registry.put(optimizer, [reducer])
    assert list(registry.all()) == [reducer]
    assert list(registry.of(optimizer)) == [reducer]
    model = weakref.ref(reducer.modules[0])
    del optimizer, reducer
    assert model() is None  # at once, though nobody has asked since
    assert list(registry.all()) == []


def test_one_that_was_asked_for_by_name_stays_to_the_end() -> None:
    registry = ReplicaRegistry()
    optimizer, reducer = trained()
    registry.keep([reducer])
    registry.put(optimizer, [reducer])
    del optimizer
    assert list(registry.all()) == [reducer]
    registry.clear()
    assert list(registry.all()) == []


def test_a_larger_reducer_takes_the_place_of_smaller_ones_for_every_optimizer() -> None:
    registry = ReplicaRegistry()
    (first, one), (second, other) = trained(), trained()
    registry.put(first, [one])
    registry.put(second, [other, one])
    both = GradientReducer([*one.modules, *other.modules], [])
    registry.replace(lambda each: each in (one, other), by=[both])
    assert list(registry.all()) == [both]
    assert list(registry.of(first)) == list(registry.of(second)) == [both]
    registry.replace(lambda each: each is both)
    assert list(registry.all()) == list(registry.of(first)) == []
