"""Where a sharded model is put."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from jupyter_distrib.worker.autoparallel.training.sharding import place


@pytest.mark.parametrize("offload", [False, True])
def test_with_cpu_offload_only_buffers_move_to_the_device(offload: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

    place(model, torch.device("meta"), offload=offload)

    assert {each.device.type for each in model.parameters()} == {"cpu" if offload else "meta"}
    assert {each.device.type for each in model.buffers()} == {"meta"}
    assert set(model.state_dict()) == {"0.weight", "0.bias", *(f"1.{name}" for name in nn.BatchNorm1d(2).state_dict())}
