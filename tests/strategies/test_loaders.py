"""Loaders that make their iterators themselves are divided as torch's own are, and go on at their position."""

from __future__ import annotations

import pytest

from tests.notebook import Notebook

pytestmark = pytest.mark.slow

SETUP = """
import torch, jupyter_distrib
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.arange(24.0).view(24, 1))

class Own(DataLoader):
    made = 0
    def _get_iterator(self):
        self.made += 1
        return super()._get_iterator()

class Direct(DataLoader):
    def __iter__(self):
        return self._get_iterator()

def train(loader, steps=99, save=None):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    seen = []
    for (x,) in loader:
        seen.append([int(each) for each in x])
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if len(seen) == steps:
            if save is not None:
                jupyter_distrib.save(save, loader=loader)
            break
    return seen
"""
DDP = "%%distributed --ranks 2 --strategy ddp --out seen\n"


@pytest.fixture(scope="module")
def book(shared_notebook: Notebook) -> Notebook:
    shared_notebook.ok(SETUP)
    return shared_notebook


@pytest.mark.parametrize("kind", ["Own", "Direct"])
def test_loaders_with_an_iterator_of_their_own_are_divided(book: Notebook, kind: str) -> None:
    read = book.ok(f"{DDP}loader = {kind}(data, batch_size=4)\ntrain(loader), len(loader), getattr(loader, 'made', 1)")
    assert "sampler added" in read.text
    shares = book.ok("print([sorted(sum(each[0], [])) for each in seen], [each[1:] for each in seen])").stdout
    assert shares.strip() == f"{[list(range(0, 24, 2)), list(range(1, 24, 2))]} [(3, 1), (3, 1)]"


def test_a_class_that_is_defined_after_the_optimizer_is_divided_too(book: Notebook) -> None:
    code = """
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
class Later(DataLoader):
    def __iter__(self):
        return self._get_iterator()
count = 0
for (x,) in Later(data, batch_size=4):
    count += len(x)
    model(x).pow(2).mean().backward()
    optimizer.step()
count"""
    book.ok(DDP + code)
    assert book.ok("list(seen)").result == "[12, 12]"


def test_the_position_of_a_loader_with_an_iterator_of_its_own_is_kept(book: Notebook) -> None:
    code = """
torch.manual_seed({})
loader = Own(data, batch_size=2, shuffle=True)
jupyter_distrib.resume("position", loader=loader)
train(loader, {}, "position")"""
    book.ok(f"{DDP}torch.manual_seed(1)\ntrain(Own(data, batch_size=2, shuffle=True))")
    book.ok("whole = list(seen)")
    book.ok(DDP + code.format(1, 2))
    book.ok(DDP + code.format(1, 99))
    assert book.ok("[each[2:] for each in whole] == list(seen)").result == "True"
