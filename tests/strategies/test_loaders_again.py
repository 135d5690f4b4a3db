"""Loaders that are met again: in the next cell with a model that an evaluation has left in eval mode, made anew for each
epoch, and with a generator that the cell seeds, saves and restores. Real kernels, real ranks."""

from __future__ import annotations

from textwrap import dedent

import pytest

from tests.notebook import Notebook

pytestmark = pytest.mark.slow

SETUP = """
import torch
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.arange(64.0).view(64, 1))

def fit(model, loader, rest):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    steps = len(loader)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=steps)
    model.train()
    for (x,) in loader:
        model(x).pow(2).mean().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        read = sum(len(x) for (x,) in rest)
    return steps, read, round(schedule.get_last_lr()[0] / 1e-4, 3)
"""
ON_TWO = "%%distributed --ranks 2 --strategy ddp"
MAKE = "model = torch.nn.Linear(1, 1)\nloader, rest = DataLoader(data, batch_size=8), DataLoader(data, batch_size=8)\n"


@pytest.fixture(scope="module")
def book(shared_notebook: Notebook) -> Notebook:
    shared_notebook.ok(SETUP)
    return shared_notebook


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_kept_loader_is_as_long_as_it_was_though_the_kept_model_is_in_eval_mode(
    book: Notebook, strategy: str
) -> None:
    line = f"%%distributed --ranks 2 --strategy {strategy} --keep model,loader,rest\n"
    for cell in (f"{line}{MAKE}", line):
        again = book.ok(f"{cell}fit(model, loader, rest)")
        assert again.result == "ranks 0-1: (4, 64, 0.1)"
        assert "len()" not in again.view
        assert "steps" not in again.view


def test_a_length_that_was_asked_while_nothing_was_in_training_mode_is_told(book: Notebook) -> None:
    book.ok(f"{ON_TWO} --keep model\n{MAKE}model.eval()")
    told = book.ok(f"{ON_TWO}\n{MAKE.splitlines()[1]}\nfit(model, loader, rest)")

    assert told.result.startswith("ranks 0-1: (8, 64, ")
    assert "called on line 3 while no model was in training mode, was that of the whole loader; read" in " ".join(
        told.view.split()
    )
    assert "each rank has a share: call model.train() before" in " ".join(told.view.split())


def test_a_length_of_an_evaluation_is_not_told(book: Notebook) -> None:
    book.ok(f"{ON_TWO} --keep model\n{MAKE}model.eval()")
    outcome = book.ok(
        f"{ON_TWO}\n{MAKE.splitlines()[1]}\noptimizer = torch.optim.SGD(model.parameters(), lr=1e-4)\nwhole = len(loader)\n"
        "read = sum(len(x) for (x,) in loader)\nmodel.train()\nfor (x,) in loader:\n"
        "    model(x).mean().backward()\n    optimizer.step()\nwhole, read"
    )

    assert outcome.result == "ranks 0-1: (8, 64)"
    assert "len()" not in outcome.view


MADE_ANEW = """
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)

def epoch():
    seen = []
    for batch in DataLoader(DATA, batch_size=8, shuffle=True):
        x = batch[0] if isinstance(batch, list) else batch
        model(x).mean().backward()
        optimizer.step()
        seen += x.flatten().tolist()
    return seen

first, second = epoch(), epoch()
first, second
"""


@pytest.mark.parametrize("made", ["rows", "TensorDataset(*data.tensors)"], ids=["a list", "a data set made anew"])
def test_a_loader_made_anew_for_each_epoch_reshuffles(book: Notebook, made: str) -> None:
    book.ok("rows = list(data.tensors[0])")
    cell = f"{ON_TWO} --out got{MADE_ANEW.replace('DATA', made)}"
    assert "sampler added" in book.ok(cell).view
    orders = "[one[number] for number in (0, 1) for one in got]"
    book.ok(f"before = {orders}\ntrue = [sorted(a + b) == list(range(64)) for a, b in (before[:2], before[2:])]")

    assert book.ok("true, before[:2] == before[2:]").result == "([True, True], False)"
    book.ok(cell)
    assert book.ok(f"before == {orders}").result == "True", "a cell that runs again does the same"
