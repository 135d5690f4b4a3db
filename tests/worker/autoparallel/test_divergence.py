"""Sums of weights from two ranks: whether they are of the same weights. Whether two ranks have read their weights after
the same steps, and have the same learning rates."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributed import HashStore

from jupyter_distrib.worker.autoparallel.checks import divergence, states_read, step_counts
from jupyter_distrib.worker.autoparallel.checks.states_read import StatesRead
from jupyter_distrib.worker.autoparallel.patches import Patches
from jupyter_distrib.worker.pytorch.rank_store import StoreBoard

OURS = [4.0, 1.5, 3.0]
"""Number of elements, sum, and sum of absolute values."""


@pytest.mark.parametrize(
    ("other", "apart"),
    [
        ([4.0, 1.5, 3.0], False),
        ([4.0, 1.5 + 1e-5, 3.0], False),
        ([4.0, 1.6, 3.0], True),
        ([4.0, 1.5, -3.0], True),
        ([4.0, math.nan, math.inf], False),
        ([5.0, 1.6, 3.0], False),
    ],
)
def test_sums_are_compared_with_a_tolerance(other: list[float], apart: bool) -> None:
    assert divergence._apart([OURS], [other]) is apart


def test_sums_of_a_device_that_computes_wrongly_can_be_compared() -> None:
    assert divergence._apart([[4.0, 1.5, -3.0]], [OURS])
    assert not divergence._apart([[4.0, 1.5, -3.0]], [[4.0, 1.5, -3.0]])


@pytest.mark.parametrize(
    ("target", "told"),
    [
        (torch.tensor([3, 1, 2, 0, 2, 1, 1, 3]), True),
        (torch.tensor([0, 1, 1, 0, 1, 0, 0, 1]), True),
        (torch.randn(8, generator=torch.Generator().manual_seed(0)), True),
        (torch.ones(8), False),
        (torch.arange(8), False),
        (torch.arange(8).roll(4), False),
        (torch.arange(4).repeat(2), False),
        (torch.arange(4).repeat_interleave(2), False),
        (torch.eye(4).flatten(), False),
        (torch.tensor([1.0]), False),
    ],
)
def test_targets_that_all_batches_have_do_not_tell_them_apart(target: torch.Tensor, told: bool) -> None:
    assert divergence._tells_batches_apart(target) is told


def test_a_target_that_cannot_be_read_any_more_is_none() -> None:
    def unpacks(_: object) -> torch.Tensor:
        raise OSError("the file is gone")

    target = torch.tensor([1.0, 2.0])
    changed = torch.nn.functional.mse_loss(torch.ones(2, requires_grad=True), target)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpacks):
        hooked = torch.nn.functional.mse_loss(torch.ones(2, requires_grad=True), target)
    assert divergence._target(changed.grad_fn).tolist() == [1.0, 2.0]
    target.add_(1)
    assert divergence._target(changed.grad_fn) is None
    assert divergence._target(hooked.grad_fn) is None


@pytest.fixture
def sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    """All models are sharded."""
    monkeypatch.setattr(states_read.ownership, "is_sharded", lambda tensor: True)


def states_difference(ours: list[int], theirs: list[int]) -> str:
    """What rank 0 says once rank 1 has ended its cell, if they have read the weights after these steps."""
    model, board, said = torch.nn.Linear(1, 1), StoreBoard(HashStore()), ""
    for rank, read in ((1, theirs), (0, ours)):
        patches, states = Patches(), StatesRead()
        for step in range(1, 1 + max(ours + theirs)):
            states.step(patches)
            if step in read:
                model.state_dict()
        patches.undo()
        said = states.difference(board, rank, 2)
    return said


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ([8, 24], [8, 16], "after 24 steps on rank 0 and after 16 on rank 1"),
        ([8], [16], "after 8 steps on rank 0 and after 16 on rank 1"),
        ([8, 16], [8], ""),
        ([8, 16], [16], ""),
        ([8, 24], [16, 24], ""),
        ([8], [], ""),
        ([8], [8], ""),
    ],
)
@pytest.mark.usefixtures("sharded")
def test_ranks_that_have_read_the_weights_after_other_steps_are_found(
    ours: list[int], theirs: list[int], said: str
) -> None:
    found = states_difference(ours, theirs)
    assert said in found
    assert bool(found) == bool(said)


@pytest.mark.usefixtures("sharded")
def test_weights_that_are_read_too_often_to_be_recorded_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states_read, "_READINGS", 3)
    assert states_difference([1, 2, 3, 4], [2, 5]) == ""


@pytest.mark.parametrize(
    ("rate", "other", "text"),
    [
        (0.1, 0.2, "0.1 on rank 0 and 0.2 on rank 1"),
        (0.1, math.nan, "0.1 on rank 0 and nan on rank 1"),
        (math.nan, math.nan, ""),
        (0.1, 0.1 + 1e-9, ""),
    ],
)
def test_learning_rates_that_are_no_numbers_are_the_same(rate: float, other: float, text: str) -> None:
    assert step_counts._rates_apart([rate], [other], 0, 1) == text
