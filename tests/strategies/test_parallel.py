"""`jupyter_distrib.parallel`: models in stages, sequences in parts and experts elsewhere train as on one device."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

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
from unittest import mock
import torch.distributed as dist
from jupyter_distrib.parallel import Pipeline
pipeline = Pipeline(mesh, stages(), loss=F.mse_loss, microbatches=4, schedule={schedule!r})
optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
parts = mesh["data"].size() if "data" in mesh.mesh_dim_names else 1
own = mesh["data"].get_local_rank() if parts > 1 else 0
losses = []
with mock.patch.multiple(dist, **{{name: None for name in dir(dist) if "_object" in name}}):
    for inputs, target in zip(x, y):
        losses.append(pipeline.step(inputs.chunk(parts)[own], target.chunk(parts)[own]))
        optimizer.step()
        optimizer.zero_grad()
losses
"""
"""No rank sends or takes a pickle meanwhile."""


@pytest.mark.parametrize(("ranks", "mesh", "schedule"), [(2, "pp=2", "gpipe"), (4, "pp=2,data=2", "1f1b")])
def test_a_pipeline_trains_as_the_whole_model(shared_notebook: Notebook, ranks: int, mesh: str, schedule: str) -> None:
    shared_notebook.ok(STAGES)
    line = f"%%distributed --ranks {ranks} --strategy tp --mesh {mesh} --out losses\n"
    told = shared_notebook.ok(line + TRAIN.format(schedule=schedule)).text
    assert "the mesh has a dimension pp: the cell distributes its model and its data itself" in told
    close = "all(abs(a - b) < 1e-6 for mine in losses for a, b in zip(mine, alone(), strict=True)), len(losses)"
    assert shared_notebook.ok(close).result == f"(True, {ranks})"


def test_a_step_leaves_the_statistics_of_a_stage_to_its_microbatches(shared_notebook: Notebook) -> None:
    shared_notebook.ok("""%%distributed --ranks 2 --strategy tp --mesh pp=2 --out seen
import torch
from jupyter_distrib.parallel import Pipeline
stages = [torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3)]
pipeline = Pipeline(mesh, stages, loss=torch.nn.functional.mse_loss, microbatches=2)
pipeline.step(torch.randn(8, 3), torch.zeros(8, 3))
int(pipeline.module.num_batches_tracked)""")
    assert shared_notebook.ok("list(seen)").result == "[2, 2]"


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


MIXTURE = """
import torch
from torch import nn
from torch.nn import functional as F

class Mixture(nn.Module):
    def __init__(self, experts_of):
        super().__init__()
        torch.manual_seed(3)
        self.choose = nn.Linear(6, 4)
        self.experts = experts_of([nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6)) for _ in range(4)])
    def forward(self, x):
        weights, chosen = self.choose(x).softmax(-1).topk(2)
        return self.experts(x, chosen, weights)

class Alone(nn.ModuleList):
    def forward(self, x, chosen, weights):
        made = torch.stack([expert(x) for expert in self], 1)
        return (made.gather(1, chosen[..., None].expand(-1, -1, 6)) * weights[..., None]).sum(1)

torch.manual_seed(0)
x, y = torch.randn(5, 16, 6), torch.randn(5, 16, 6)

def trained(model, rows, between=lambda: None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for inputs, target in zip(x, y):
        F.mse_loss(model(inputs[rows]), target[rows]).backward()
        between()
        optimizer.step()
        optimizer.zero_grad()
    return {name.replace("experts.experts", "experts"): each.detach() for name, each in model.named_parameters()}

whole = trained(Mixture(Alone), slice(None))
"""


@pytest.mark.parametrize(("ranks", "mesh"), [(2, "ep=2"), (4, "data=2,ep=2")])
def test_experts_on_other_ranks_train_as_on_one_device(shared_notebook: Notebook, ranks: int, mesh: str) -> None:
    shared_notebook.ok(MIXTURE)
    shared_notebook.ok(f"""%%distributed --ranks {ranks} --strategy tp --mesh {mesh} --out found
from jupyter_distrib.parallel import Experts, average_expert_gradients
model = Mixture(lambda experts: Experts(mesh, experts))
ours = trained(model, slice(rank, None, world_size), lambda: average_expert_gradients(model, mesh))
sorted({{name.split(".")[1] for name in ours if "experts" in name}}), max((ours[n] - whole[n]).abs().max().item() for n in ours)""")
    assert shared_notebook.ok("all(difference < 1e-6 for _, difference in found)").result == "True"
    assert shared_notebook.ok("[names for names, _ in found]").result == str([["0", "1"], ["2", "3"]] * (ranks // 2))


@pytest.mark.parametrize(
    ("mesh", "code", "sentence"),
    [
        ("cp=2", "Pipeline(mesh, [], loss=None, microbatches=2)", "Pipeline needs a mesh with a dimension pp, such as --mesh pp=2; this one has cp."),
        ("pp=2", "Pipeline(mesh, [torch.nn.Linear(1, 1)], loss=None, microbatches=2)", "Pipeline was given 1 stages, and the mesh has 2 ranks along pp"),
        ("pp=2", "Pipeline(mesh, [None, None], loss=None, microbatches=1)", "Pipeline needs at least as many microbatches as stages, 2; got 1."),
        ("pp=2", "Pipeline(mesh, [None, None], loss=None, microbatches=2, schedule='dual')", "Pipeline has the schedules 1f1b and gpipe; got 'dual'."),
        ("pp=2", "Pipeline(mesh, [torch.nn.LSTM(1, 1)] * 2, loss=None, microbatches=2).step(torch.ones(2, 1), None)",
         "Pipeline needs stages that return a tensor or a tuple of tensors; stage 0 returned tuple."),
        ("cp=2", "Experts(mesh, [])", "Experts needs a mesh with a dimension ep, such as --mesh ep=2; this one has cp."),
        ("ep=2", "Experts(mesh, [torch.nn.Identity()] * 3)", "Experts was given 3 experts, which 2 ranks along ep cannot divide evenly: give a multiple."),
        ("ep=2", "i = torch.ones(2, 1)\nExperts(mesh, [torch.nn.Identity()] * 2)(torch.ones(3, 1), i.long(), i)", "there are 3 tokens, and the shapes are (2, 1) and (2, 1)."),
        ("ep=2", "i = torch.ones(2, 1)\nExperts(mesh, [torch.nn.Identity()] * 2)(i, 2 * i.long(), i)", "Experts has 2 experts, and number 2 was chosen."),
        ("cp=2", "with context_parallel(mesh['cp'], torch.ones(1, 3)): pass", "context_parallel divides a sequence into 2 parts, and one has 3 positions: pad it."),
        ("cp=2", "q = torch.ones(1, 1, 2, 4)\nwith context_parallel(mesh['cp']):\n    torch.nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.1)",
         "attention over a divided sequence takes neither attn_mask nor dropout_p"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said_in_a_sentence(
    shared_notebook: Notebook, mesh: str, code: str, sentence: str
) -> None:
    start = dedent(f"""\
        %%distributed --ranks 2 --strategy tp --mesh {mesh}
        import torch
        from jupyter_distrib.parallel import *
    """)
    assert sentence in shared_notebook.fails(start + code).text


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["pipeline.ipynb", "context_parallel.ipynb", "expert_parallel.ipynb"])
def test_the_notebook_trains(tmp_path: Path, name: str) -> None:
    assert outputs(executed(name, tmp_path)[-1]).splitlines()[-1] == "learned: True"
