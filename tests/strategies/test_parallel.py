"""`jupyter_distrib.parallel`: a model in stages, and long sequences in parts, train as the whole on one device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.notebook import Notebook
from tests.repository.test_notebooks import executed, outputs

pytestmark = pytest.mark.slow

STAGES = """
import torch
from torch import nn
from torch.nn import functional as F

def stages():
    torch.manual_seed(2)
    return [nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Linear(8, 2)]

torch.manual_seed(0)
x, y = torch.randn(5, 16, 6), torch.randn(5, 16, 2)

def alone():
    model = nn.Sequential(*stages())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for inputs, target in zip(x, y):
        loss = F.mse_loss(model(inputs), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
"""
TRAIN = """
from jupyter_distrib.parallel import Pipeline
pipeline = Pipeline(mesh, stages(), loss=F.mse_loss, microbatches=4, schedule={schedule!r})
optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
parts = mesh["data"].size() if "data" in mesh.mesh_dim_names else 1
own = mesh["data"].get_local_rank() if parts > 1 else 0
losses = []
for inputs, target in zip(x, y):
    losses.append(pipeline.step(inputs.chunk(parts)[own], target.chunk(parts)[own]))
    optimizer.step()
    optimizer.zero_grad()
losses
"""


@pytest.mark.parametrize(("ranks", "mesh", "schedule"), [(2, "pp=2", "gpipe"), (4, "pp=2,data=2", "1f1b")])
def test_a_pipeline_trains_as_the_whole_model(shared_notebook: Notebook, ranks: int, mesh: str, schedule: str) -> None:
    shared_notebook.ok(STAGES)
    line = f"%%distributed --ranks {ranks} --strategy tp --mesh {mesh} --out losses\n"
    told = shared_notebook.ok(line + TRAIN.format(schedule=schedule)).text
    assert "the mesh has a dimension pp: the cell spreads its model and its data itself" in told
    close = "all(abs(a - b) < 1e-6 for mine in losses for a, b in zip(mine, alone(), strict=True)), len(losses)"
    assert shared_notebook.ok(close).result == f"(True, {ranks})"


ATTENTION = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.take, self.give = nn.Linear(4, 24), nn.Linear(8, 4)
    def forward(self, x):
        q, k, v = self.take(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        return self.give(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

torch.manual_seed(0)
x, y = torch.randn(3, 8, 4), torch.randn(3, 8, 4)
torch.manual_seed(1)
net = Net()
F.mse_loss(net(x), y).backward()
whole = torch.cat([each.grad.flatten() for each in net.parameters()])
net.zero_grad()
"""


def test_attention_over_a_divided_sequence_has_the_gradients_of_the_whole(shared_notebook: Notebook) -> None:
    shared_notebook.ok(ATTENTION)
    shared_notebook.ok("""%%distributed --ranks 2 --strategy tp --mesh cp=2 --out found
from jupyter_distrib.parallel import average_gradients, context_parallel
with context_parallel(mesh["cp"], x, y) as (inputs, target):
    loss = F.mse_loss(net(inputs), target)
    loss.backward()
average_gradients(net.parameters(), mesh["cp"])
grads = torch.cat([each.grad.flatten() for each in net.parameters()])
tuple(inputs.shape), (grads - whole).abs().max().item() < 1e-6""")
    assert shared_notebook.ok("list(found)").result == "[((3, 4, 4), True), ((3, 4, 4), True)]"


@pytest.mark.parametrize(
    ("mesh", "code", "sentence"),
    [
        ("cp=2", "Pipeline(mesh, [], loss=None, microbatches=2)", "Pipeline wants a mesh with a dimension pp, such as --mesh pp=2; this one has cp."),
        ("pp=2", "Pipeline(mesh, [torch.nn.Linear(1, 1)], loss=None, microbatches=2)", "Pipeline was given 1 stages, and the mesh has 2 ranks along pp"),
        ("pp=2", "Pipeline(mesh, [None, None], loss=None, microbatches=1)", "Pipeline wants at least as many microbatches as stages, 2; got 1."),
        ("pp=2", "Pipeline(mesh, [None, None], loss=None, microbatches=2, schedule='dual')", "Pipeline has the schedules 1f1b and gpipe; got 'dual'."),
        ("cp=2", "with context_parallel(mesh['cp'], torch.ones(1, 3)): pass", "context_parallel divides a sequence into 2 parts, and one has 3 places: pad it."),
        ("cp=2", "q = torch.ones(1, 1, 2, 4)\nwith context_parallel(mesh['cp']):\n    torch.nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.1)",
         "attention over a divided sequence takes neither attn_mask nor dropout_p"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said_in_a_sentence(
    shared_notebook: Notebook, mesh: str, code: str, sentence: str
) -> None:
    start = (
        f"%%distributed --ranks 2 --strategy tp --mesh {mesh}\nimport torch\nfrom jupyter_distrib.parallel import *\n"
    )
    assert sentence in shared_notebook.fails(start + code).text


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["pipeline.ipynb", "context_parallel.ipynb"])
def test_the_notebook_trains(tmp_path: Path, name: str) -> None:
    assert outputs(executed(name, tmp_path)[-1]).splitlines()[-1] == "learned: True"
