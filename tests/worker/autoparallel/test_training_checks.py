"""Which losses are sums over a batch, and which learning rates are computed from the length of the whole loader."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from jupyter_distrib.worker.autoparallel.checks.sum_losses import is_sum_loss

X, Y, CLASSES = torch.ones(4, 3, requires_grad=True), torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64)
WEIGHT = torch.nn.Parameter(torch.ones(8, 4))
SUMS = {
    "mse": lambda: F.mse_loss(X, Y, reduction="sum"),
    "cross entropy": lambda: F.cross_entropy(X, CLASSES, reduction="sum"),
    "by hand": ((X - Y) ** 2).sum,
    "scaled, with a penalty": lambda: F.mse_loss(X, Y, reduction="sum") / 8 + 0.1 * X.norm(),
    "divided by the size of the whole batch": lambda: ((X - Y) ** 2).sum() / 8,
    "a difference": lambda: F.mse_loss(X, Y, reduction="sum") - 0.5 * torch.sum(1 + X - X.exp()),
    "flattened": lambda: (X - Y).reshape(-1).square().sum(),
}
MEANS = {
    "mse": lambda: F.mse_loss(X, Y),
    "cross entropy": lambda: F.cross_entropy(X, CLASSES),
    "by hand": ((X - Y) ** 2).mean,
    "a sum over classes": lambda: ((X - Y) ** 2).sum(1).mean(),
    "no graph": lambda: torch.tensor(1.0),
    "divided by its mask": lambda: ((X - Y) ** 2).sum() / torch.ones(4, 3).sum().clamp(min=1),
    "divided by its number of samples": lambda: ((X - Y) ** 2).sum() / len(X),
    "divided by its number of elements": lambda: ((X - Y) ** 2).sum() / X.numel(),
    "torch's, divided by its number of samples": lambda: F.cross_entropy(X, CLASSES, reduction="sum") / len(X),
    "a sum over tasks": lambda: ((X - Y) ** 2).mean(0).sum(),
    "a penalty on weights": lambda: F.mse_loss(X, Y) + 0.1 * (WEIGHT.abs().sum() + (WEIGHT**2).sum()),
}


@pytest.mark.parametrize("how", SUMS)
@pytest.mark.versions
def test_a_sum_is_found(how: str) -> None:
    assert is_sum_loss(SUMS[how](), samples=4, ranks=2)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("how", MEANS)
def test_a_mean_is_none(how: str) -> None:
    assert not is_sum_loss(MEANS[how](), samples=4, ranks=2)  # type: ignore[no-untyped-call]
