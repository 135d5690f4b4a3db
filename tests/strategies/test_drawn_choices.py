"""What ranks draw at random once the cell has its optimizer, and what they are told about it: sizes, learning rates and
batches of a random search, and batches that a seed makes the same."""

from __future__ import annotations

import re
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


# ---------------------------------------------------------------------------------------------- the trials of a search

TRIALS = """
for trial in range(3):
    {choice}
    model = nn.Sequential(nn.Linear(6, size), nn.Linear(size, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for x, y in DataLoader(data, batch_size=batch, shuffle=True): update(model, optimizer, x, y)
{last}"""
PLAIN = "size, lr, batch = 4, 1e-2, 8"
LAST = """
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for x, y in DataLoader(data, batch_size=8): update(model, optimizer, x, y)"""


def trials(choice: str, last: str = "") -> str:
    return TRIALS.format(choice=f"{PLAIN}; {choice}", last=last)


@pytest.mark.parametrize("strategy", [DDP, FSDP])
def test_sizes_that_each_rank_has_drawn_are_an_error_that_says_why(book: Notebook, strategy: str) -> None:
    book.ok(f"{DDP} --fresh\npass")

    told = book.fails(f"{strategy}\n{trials('size = random.randint(1, 10**4)')}").traceback
    assert "Sequential has different parameters on different ranks: build it identically on all of them. " in told
    assert "each rank draws other random numbers" in told
    assert "random.Random(0)" in told
    book.ok(f"{strategy}\ndraw = random.Random(0)\n{trials('size = draw.randint(1, 100)')}")


def test_sizes_that_differ_from_the_beginning_are_not_said_to_be_drawn(book: Notebook) -> None:
    told = book.fails(f"{DDP} --fresh\ntorch.optim.SGD(nn.Linear(2, 2 + rank).parameters(), lr=1)").traceback

    assert "build it identically" in told
    assert "draws other" not in told


@pytest.mark.parametrize("last", ["", LAST], ids=["the last trial", "an earlier one"])
@pytest.mark.parametrize("strategy", [DDP, FSDP])
def test_learning_rates_that_each_rank_has_drawn_are_named(book: Notebook, strategy: str, last: str) -> None:
    view = book.ok(f"{strategy} --fresh\n{trials('lr = 10 ** random.uniform(-5, -2)', last)}").view

    assert "Adam has begun with a learning rate of " in view, view
    assert "random.Random(0)" in view
    assert "own share of the data" not in view
    alike = book.ok(f"{strategy} --fresh\n{trials('lr = 10.0 ** -trial', last)}").view
    assert "learning rate" not in alike


@pytest.mark.timeout(120)
@pytest.mark.parametrize("strategy", [DDP, FSDP])
def test_batch_sizes_that_each_rank_has_drawn_are_named_though_the_ranks_then_hang(
    book: Notebook, strategy: str
) -> None:
    choice = "batch = 8 if trial == 0 else (4, 16)[rank]"
    view = book.cell(f"{strategy} --fresh --hang-timeout 6\n{trials(choice)}", timeout_s=90).text

    sizes = re.search(r"the data loader read on line 7 has batches of (\d+) samples on one rank and of (\d+) on", view)
    assert sizes, view
    assert {*sizes.groups()} == {"4", "16"}
    assert "random.Random(0)" in view


def test_samples_that_each_rank_has_chosen_by_its_own_results_are_told_what_to_do(book: Notebook) -> None:
    chosen = "hard = [rank * 16 + each for each in range(16)]"
    loop = "for x, y in DataLoader(Subset(data, hard), batch_size=4): update(model, optimizer, x, y)"
    view = book.ok(
        f"{DDP} --fresh\nmodel = Net()\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n{chosen}\n{loop}"
    ).view

    assert "holds different samples on different ranks" in view
    assert "chosen them by its own results, take those of rank 0 by torch.distributed.broadcast_object_list()" in view


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

    assert f"{SAME}{cause}: call {CALLS[by]} " in shown, shown
    cured = CALLS[by].replace(" and ", "; ")
    assert "losses are the same" not in book.ok(f"{DDP}{DRAWN.format(seed=seed, again=cured, draw=BY[by])};").view


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


# --------------------------------------------------------------------------------------------------- copies of a model

NETWORKS = """
import jupyter_distrib
policy, target = Net(), Net()
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
{prepare}
for x, y in DataLoader(data, batch_size=8):
    with torch.no_grad(): aim = target(x)
    update(policy, optimizer, x, aim + y)
    target.load_state_dict(policy.state_dict())
(weights(policy) - weights(target)).abs().max().item()"""


def test_a_target_network_that_is_whole_is_told_to_be_prepared(book: Notebook) -> None:
    told = book.fails(f"{FSDP}{NETWORKS.format(prepare='')}").text

    assert (
        "load_state_dict() was called with weights of a sharded model for one that is whole: give the whole one" in told
    )
    assert book.ok(f"{FSDP}{NETWORKS.format(prepare='jupyter_distrib.prepare(target)')}").result == "ranks 0-1: 0.0"
