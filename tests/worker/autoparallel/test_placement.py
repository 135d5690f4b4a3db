"""Where the parts of a sharded model are placed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from jupyter_distrib.worker.autoparallel.training import sharding


@pytest.mark.parametrize(("offload", "parameters"), [(True, "cpu"), (False, "meta")])
def test_parameters_that_are_offloaded_stay_on_the_cpu(*, offload: bool, parameters: str) -> None:
    """FSDP refuses others in its first forward pass; the buffers are not offloaded. `meta` stands for a GPU."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2)))
    sharding.place(model, torch.device("meta"), offload=offload)
    assert {each.device.type for each in model.parameters()} == {parameters}
    assert {each.device.type for each in model.buffers()} == {"meta"}
