"""One kernel for the tests of a module, with a small problem whose single-device solution they compare with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import leftovers_after
from tests.frameworks.training import missing
from tests.notebook import Notebook

PROBLEM = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(160, 4)
y = x @ torch.randn(4, 1)
samples = TensorDataset(x, y)

def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

def config(stage, **more):
    # DeepSpeed clips gradients to a norm of 1 unless it is told not to
    return {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0, "zero_optimization": {"stage": stage}, **more}

def alone(steps=20, accumulation=1):
    '''The same training on one device: (losses, weights).'''
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(steps):
        rows = slice(step * 8 * accumulation, (step + 1) * 8 * accumulation)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, weights_of(model)

def weights_of(model):
    return torch.cat([each.detach().flatten().clone() for each in model.parameters()])
"""
"""Two ranks with 4 samples each do the steps of one device with 8."""

NOT_INSTALLED = missing("deepspeed")


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    if NOT_INSTALLED:
        pytest.skip(f"{NOT_INSTALLED}; sh .ci/deepspeed runs them")
    with Notebook(tmp_path_factory.mktemp("deepspeed"), {"CUDA_VISIBLE_DEVICES": ""}) as book:
        book.ok("%load_ext jupyter_distrib")
        book.ok(PROBLEM)
        name = "from jupyter_distrib.kernel.session import session as _s; print(_s.current().identity.name)"
        session = book.ok(name).stdout.strip()
        yield book
    leftovers_after(session)
