"""Sums of weights from two ranks: whether they are of the same weights. Whether two ranks have read their weights after
the same steps, and have the same learning rates."""

from __future__ import annotations

import math

import pytest
import torch

from jupyter_distrib.worker.autoparallel.checks import divergence

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
