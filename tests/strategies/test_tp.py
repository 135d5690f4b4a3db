"""`--strategy tp`: the mesh is there as `mesh`, torch's plans apply, alone and together with sharded data parallelism. Real
kernels."""

from __future__ import annotations

import re
from textwrap import dedent

import pytest

from jupyter_distrib.errors import OptionsError
from jupyter_distrib.strategies.tp import dimensions
from tests.notebook import Notebook

pytestmark = pytest.mark.slow

DEFINITIONS = """
import torch, jupyter_distrib
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.head = nn.Linear(6, 32), nn.Linear(32, 8), nn.Linear(8, 2)
    def forward(self, x):
        return self.head(self.down(self.up(x).relu()))

def build():
    torch.manual_seed(0)
    return Net()

def data():
    random = torch.Generator().manual_seed(1)
    x = torch.randn(32, 6, generator=random)
    return TensorDataset(x, (x.sum(1) > 0).long())

def train(model, batch_size):
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    losses = []
    for x, y in DataLoader(data(), batch_size=batch_size):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses

def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
"""


@pytest.fixture(scope="module")
def book(shared_notebook: Notebook) -> Notebook:
    shared_notebook.ok(DEFINITIONS)
    return shared_notebook


def test_a_plan_over_the_mesh_gives_what_one_process_gives(book: Notebook) -> None:
    book.ok("alone = build()\nexpected = train(alone, 8)")
    book.ok(
        dedent("""\
            %%distributed --ranks 2 --strategy tp --out out
            model = parallelize_module(build(), mesh['model'], PLAN)
            losses = train(model, 8)
            losses, model.state_dict(), local(model.up.weight).shape[0]""")
    )

    shown = book.ok(
        "print(all(max(abs(a - b) for a, b in zip(out[r][0], expected)) < 1e-4 for r in (0, 1)), out[0][2],\n"
        "      max((out[0][1][k] - v).abs().max().item() for k, v in alone.state_dict().items()) < 1e-4)"
    )
    assert shown.stdout == "True 16 True\n"


@pytest.mark.versions
def test_two_dimensions_with_4_ranks_are_sharded_and_parallel_and_can_be_saved(book: Notebook) -> None:
    book.ok("alone = build()\nexpected = train(alone, 8)")
    cell = dedent("""\
        %%distributed --ranks 4 --strategy tp --mesh data=2,model=2 --out out
        torch.manual_seed(rank)
        model = Net()
        if rank == 0:
            model.load_state_dict(build().state_dict())
        for p in model.parameters():
            torch.distributed.broadcast(p.data, 0)
        model = parallelize_module(model, mesh['model'], PLAN)
        losses = train(model, 4)
        jupyter_distrib.save('both', model=model)
        losses, model, local(model.up.weight).numel(), mesh.get_local_rank('data')""")
    text = book.ok(cell).text

    assert "Net sharded: 1/2 of 506 parameters on each rank" in text
    shown = book.ok(
        dedent("""\
            mean = [(a + b) / 2 for a, b in zip(out[0][0], out[2][0])]
            again = Net(); jupyter_distrib.load('both', model=again)
            print([each[2] for each in out], [each[3] for each in out], type(out[0][1]) is Net, out[0][0] == out[1][0],
                  all(torch.equal(again.state_dict()[k], v) for k, v in out[0][1].state_dict().items()),
                  max((again.state_dict()[k] - v).abs().max().item() for k, v in alone.state_dict().items()) < 1e-2)""")
    )
    assert shown.stdout == "[48, 48, 48, 48] [0, 0, 1, 1] True True True True\n"


def test_without_a_plan_it_is_said_that_all_ranks_do_the_same(book: Notebook) -> None:
    cell = dedent("""\
        %%distributed --ranks 2 --strategy tp
        losses = train(build(), 8)
        losses[-1] < losses[0]""")
    text = book.ok(cell).text

    assert "no parameter of Net is distributed over the mesh, so all ranks do the same" in text


def test_a_mesh_for_another_number_of_ranks_is_refused(book: Notebook) -> None:
    failed = book.fails("%%distributed --ranks 2 --strategy tp --mesh data=2,model=2\n1")

    assert failed.evalue == (
        "--mesh data=2,model=2 needs 4 ranks, and there are 2: run the cell with 4 ranks, or give a mesh for 2."
    )
    assert "data=2" in book.fails("%%distributed --ranks 2 --strategy tp --mesh 2x2\n1").evalue
    assert book.ok("%%distributed --ranks 2 --strategy tp\nmesh.mesh_dim_names").result == "ranks 0-1: ('model',)"


def test_a_mesh_of_the_notebooks_own_is_not_replaced(book: Notebook) -> None:
    book.ok("mesh = 'mine'")
    assert book.ok("%%distributed --ranks 2 --strategy tp\nmesh").result == "ranks 0-1: 'mine'"
    book.ok("del mesh")


def test_explain_knows_which_dimensions_the_mesh_has(book: Notebook) -> None:
    cell = "model = parallelize_module(build(), mesh['model'], PLAN)\nlosses = train(model, 8)"
    plain = book.ok(f"%%distributed --ranks 2 --strategy tp --explain\n{cell}").result
    both = book.ok(f"%%distributed --ranks 4 --strategy tp --mesh data=2,model=2 --explain\n{cell}").result

    assert re.search(
        r"line 2 +parallelize_module\(build\(\), mesh\['model'\], PLAN\) +spread over the mesh by this plan", plain
    )
    model = "its model is spread over the mesh by the plan that the cell gives"
    assert re.search(rf"torch.optim.AdamW\(model.parameters\(\), 0.01\) +{model}\n", plain)
    assert "whole on every rank, since the mesh has no dimension `data`" in plain
    assert f"{model}, and sharded over its dimension `data`, large blocks that it repeats as units" in both
    assert "divided among the ranks where it is trained with" in both


@pytest.mark.parametrize("text", ["", "data", "data=0", "data=x", "2", "data=2,,model=2", "a=1,a=2", "data=-1"])
def test_what_is_not_a_mesh(text: str) -> None:
    with pytest.raises(OptionsError):
        dimensions("--mesh", text)


def test_what_is_a_mesh() -> None:
    assert dimensions("--mesh", "data=2, model=4") == (("data", 2), ("model", 4))
