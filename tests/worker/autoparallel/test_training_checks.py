"""Which losses are sums over a batch, and which learning rates are computed from the length of the whole loader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from jupyter_distrib.worker.autoparallel.checks.manual_rates import ManualRates
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
    "of some samples": F.cross_entropy(X, CLASSES, reduction="none")[torch.tensor([True, True, True, False])].sum,
    "of some samples, weighted": (2 * (X - Y).square().sum(1)[torch.tensor([0, 1, 3])]).sum,
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
    "torch's, divided by its number of elements": lambda: F.mse_loss(X, Y, reduction="sum") / X.numel(),
    "a sum over some tasks": ((X - Y) ** 2).mean(0)[torch.tensor([0, 2])].sum,
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


def cut_short(
    names: dict[str, Any],
    *,
    backwards: int = 1,
    rate: Callable[[float], float] = float,
    change: Callable[[dict[str, Any], int], object] = lambda names, step: None,
) -> tuple[str, int, int] | None:
    """What is noted on one of two ranks after a cell with these names, whose learning rate is another for each step."""
    rates = ManualRates("cell")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    scope = {
        "names": names, "change": change, "rate": rate, "optimizer": optimizer,
        "stepped": lambda step: rates.stepped(optimizer, 3 + step * backwards),
    }  # fmt: skip
    code = """
def train(change, rate, optimizer, stepped):
    for step in range(1, 11):
        change(globals(), step)
        optimizer.param_groups[0]["lr"] = rate(1 - step / 100)
        stepped(step)
globals().update(globals().pop("names"))
train(change, rate, optimizer, stepped)
"""
    exec(compile(code, "cell", "exec"), scope)
    return rates.cut_short(2)


@pytest.mark.parametrize(
    "name", ["n_steps", "num_training_steps", "max_iters", "lr_decay_iters", "TOTAL_STEPS", "T_max"]
)
def test_a_rate_that_has_not_reached_its_end_is_found(name: str) -> None:
    assert cut_short({name: 20}) == (name, 20, 10)
    assert cut_short({"settings": {name: 20}}) == (f"settings[{name!r}]", 20, 10)


@pytest.mark.parametrize("name", ["print_steps", "snapshot_steps", "contain_iters", "small_steps", "new_steps"])
def test_a_number_of_other_steps_is_no_limit(name: str) -> None:
    assert cut_short({name: 20}) is None


def test_a_step_every_two_batches_reaches_the_end_of_its_rate() -> None:
    assert cut_short({"max_iters": 20}, backwards=2) is None


def test_a_running_count_is_no_limit() -> None:
    def count(names: dict[str, Any], step: int) -> None:
        names["total"] = 16 + step

    assert cut_short({}, change=count) is None


def test_a_rate_of_numpy_is_a_rate() -> None:
    assert cut_short({"max_iters": 20}, rate=np.float64) == ("max_iters", 20, 10)


def test_large_dicts_are_not_searched_for_a_number_of_steps() -> None:
    assert cut_short({"settings": {"max_iters": 20, **{str(each): each for each in range(1000)}}}) is None


def test_a_failure_to_look_at_the_names_of_a_cell_does_not_end_its_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def changing(*_: object) -> None:
        raise RuntimeError("dictionary changed size during iteration")

    monkeypatch.setattr("jupyter_distrib.worker.autoparallel.checks.manual_rates._numbers", changing)
    assert cut_short({"max_iters": 20}) is None
