"""Which replicas a run has: they end with their optimizers."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from jupyter_distrib.worker.autoparallel.gradient_reducer import Replica
from jupyter_distrib.worker.autoparallel.replica_registry import Roster


def trained() -> tuple[torch.optim.Optimizer, Replica]:
    model = nn.Linear(2, 1)
    return torch.optim.SGD(model.parameters(), lr=0.1), Replica([model], [])


def test_a_replica_ends_with_its_optimizer_and_frees_the_model() -> None:
    roster = Roster()
    optimizer, replica = trained()
    roster.put(optimizer, [replica])
    assert list(roster.all()) == [replica]
    assert list(roster.of(optimizer)) == [replica]
    model = weakref.ref(replica.modules[0])
    del optimizer, replica
    assert model() is None  # at once, though nobody has asked since
    assert list(roster.all()) == []


def test_one_that_was_asked_for_by_name_stays_to_the_end() -> None:
    roster = Roster()
    optimizer, replica = trained()
    roster.keep([replica])
    roster.put(optimizer, [replica])
    del optimizer
    assert list(roster.all()) == [replica]
    roster.clear()
    assert list(roster.all()) == []


def test_a_larger_replica_takes_the_place_of_smaller_ones_for_every_optimizer() -> None:
    roster = Roster()
    (first, one), (second, other) = trained(), trained()
    roster.put(first, [one])
    roster.put(second, [other, one])
    both = Replica([*one.modules, *other.modules], [])
    roster.replace(lambda each: each in (one, other), by=[both])
    assert list(roster.all()) == [both]
    assert list(roster.of(first)) == list(roster.of(second)) == [both]
    roster.replace(lambda each: each is both)
    assert list(roster.all()) == list(roster.of(first)) == []
