"""The memory that a kept value holds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from jupyter_distrib.worker.pytorch.tensor_memory import size_bytes

MODEL_BYTES = 4 * (100 * 10 + 10)


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(100, 10)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 100)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_views_and_tied_weights_count_once_and_a_small_view_holds_its_whole_storage() -> None:
    whole = torch.zeros(1000)
    assert size_bytes({"a": whole, "b": [whole[:10], whole.view(10, 100)]}) == size_bytes(whole[:1]) == 4000


def test_a_model_holds_its_gradients_and_an_optimizer_its_state_too() -> None:
    model, optimizer = trained()
    assert size_bytes(model) == 2 * MODEL_BYTES
    steps = 2 * 4  # of its two parameters
    assert size_bytes(optimizer) == size_bytes((model, optimizer)) == 4 * MODEL_BYTES + steps


@pytest.mark.parametrize("value", [3, "text", {"a": {"b": object()}}, torch.empty(9, device="meta"), [0] * 100_000])
def test_other_values_hold_nothing(value: object) -> None:
    assert size_bytes(value) == 0


def test_containers_in_containers_are_not_looked_through_for_ever() -> None:
    nested: list[object] = []
    for _ in range(5):  # 1000 to the power of 5 places
        nested = [nested] * 1000
    assert size_bytes([torch.zeros(1000), nested]) == 4000
