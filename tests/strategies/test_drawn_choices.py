"""What ranks draw at random once the cell has its optimizer, and what they are told about it: sizes, learning rates and
batches of a random search, and batches that a seed makes the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.notebook import Notebook
from tests.strategies.cases import SETUP

pytestmark = pytest.mark.slow  # the quick tests have enough of kernels and ranks without these
DDP, FSDP = ("%%distributed --ranks 2 --strategy " + name for name in ("ddp", "fsdp"))


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    with Notebook(tmp_path_factory.mktemp("notebook")) as book:
        book.ok("%load_ext jupyter_distrib")
        book.ok(f"import random, numpy\n{SETUP}")
        yield book


# -------------------------------------------------------------------------------------- batches that a seed makes alike

DRAWN = """
{seed}
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{again}
for step in range(4):
    chosen = {draw}
    update(model, optimizer, features[chosen], targets[chosen])"""
BY = {
    "torch": "torch.randint(48, (8,))",
    "random": "random.sample(range(48), 8)",
    "numpy": "numpy.random.randint(48, size=8)",
    "both": "[*random.sample(range(48), 4), *numpy.random.randint(48, size=4)]",
}
CALLS = {
    "torch": "torch.manual_seed(rank)",
    "random": "random.seed(rank)",
    "numpy": "numpy.random.seed(rank)",
    "both": "random.seed(rank) and numpy.random.seed(rank)",
}
SAME = "Batches that are drawn at random are the same because of "


@pytest.mark.parametrize(
    ("earlier", "seed", "cause"),
    [
        ("torch.manual_seed(0)", "", "torch.manual_seed() of an earlier cell"),
        ("", "torch.manual_seed(0)", "torch.manual_seed() of this cell"),
        ("torch.manual_seed(0)", "torch.manual_seed(0)", "torch.manual_seed() of this cell"),
    ],
    ids=["earlier", "here", "both"],
)
@pytest.mark.parametrize("by", BY)
def test_the_seed_to_change_is_that_of_the_stream_that_draws_the_batches(
    book: Notebook, by: str, earlier: str, seed: str, cause: str
) -> None:
    book.ok(f"{DDP} --fresh\n{earlier or 'pass'}")
    shown = book.ok(f"{DDP}{DRAWN.format(seed=seed, again='', draw=BY[by])};").view

    assert f"{SAME}{cause}: call {CALLS[by]} once the model is made" in shown, shown
    cured = CALLS[by].replace(" and ", "; ")
    assert "are the same on all ranks" not in book.ok(f"{DDP}{DRAWN.format(seed=seed, again=cured, draw=BY[by])};").view


def test_each_stream_has_the_seed_that_the_cell_has_given_it(book: Notebook) -> None:
    seed = "torch.manual_seed(0); random.seed(0); numpy.random.seed(0)"
    shown = book.ok(f"{DDP} --fresh{DRAWN.format(seed=seed, again='', draw=BY['both'])};").view

    cause = "random.seed() and numpy.random.seed() of this cell"
    assert f"{SAME}{cause}: call random.seed(rank) and numpy.random.seed(rank) once the model is made" in shown, shown


@pytest.mark.parametrize("draw", ["slice(step * 8, step * 8 + 8)", "torch.randint(48, (8,), generator=fixed)"])
def test_no_seed_is_named_for_batches_that_no_stream_has_drawn(book: Notebook, draw: str) -> None:
    seed = "torch.manual_seed(0); fixed = torch.Generator().manual_seed(0)"
    shown = book.ok(f"{DDP} --fresh{DRAWN.format(seed=seed, again='', draw=draw)};").view

    assert "losses are the same on all ranks" in shown
    assert SAME not in shown
