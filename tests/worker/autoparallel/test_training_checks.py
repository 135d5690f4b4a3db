"""Which losses are sums over a batch."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from jupyter_distrib.worker.autoparallel.checks import training_checks

X, Y, CLASSES = torch.ones(4, 3, requires_grad=True), torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64)
SUMS = {
    "mse": lambda: F.mse_loss(X, Y, reduction="sum"),
    "cross entropy": lambda: F.cross_entropy(X, CLASSES, reduction="sum"),
    "by hand": ((X - Y) ** 2).sum,
    "scaled, with a penalty": lambda: F.mse_loss(X, Y, reduction="sum") / 4 + 0.1 * X.norm(),
}
MEANS = {
    "mse": lambda: F.mse_loss(X, Y),
    "cross entropy": lambda: F.cross_entropy(X, CLASSES),
    "by hand": ((X - Y) ** 2).mean,
    "a sum over classes": lambda: ((X - Y) ** 2).sum(1).mean(),
    "no graph": lambda: torch.tensor(1.0),
}


@pytest.mark.parametrize("how", SUMS)
@pytest.mark.versions
def test_a_sum_is_found(how: str) -> None:
    assert training_checks.is_sum_loss(SUMS[how]())  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("how", MEANS)
def test_a_mean_is_none(how: str) -> None:
    assert not training_checks.is_sum_loss(MEANS[how]())  # type: ignore[no-untyped-call]
