"""What a rank draws at random when nobody has seeded anything."""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Iterator

import pytest
import torch

from tests.notebook import Notebook

pytestmark = pytest.mark.slow  # the quick tests have enough of kernels and ranks without these

DRAW = "import random, numpy, torch\n(torch.rand(1).item(), random.random(), float(numpy.random.rand()))"


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    with Notebook(tmp_path_factory.mktemp("notebook")) as book:
        book.ok("%load_ext jupyter_distrib")
        yield book


def drawn(book: Notebook, line: str) -> tuple[tuple[float, ...], ...]:
    """By rank."""
    book.ok(f"%%distributed --ranks 2 --out drawn {line}\n{DRAW}")
    return tuple(map(tuple, literal_eval(book.ok("[*drawn]").result)))


def test_ranks_draw_different_numbers_and_new_ones_each_time(book: Notebook) -> None:
    numbers = [*drawn(book, "--fresh"), *drawn(book, "--fresh")]

    for kind in zip(*numbers, strict=True):
        assert len(set(kind)) == 4


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_that_train_together_draw_the_same_from_the_first_cell_on(book: Notebook, strategy: str) -> None:
    first, again = drawn(book, f"--fresh --strategy {strategy}"), drawn(book, f"--strategy {strategy}")

    assert first[0] == first[1]
    assert again[0] == again[1]
    assert not set(first[0]) & set(again[0])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    "drifts",
    [
        "import torch\nif rank == 0: torch.rand(3)",
        "import random, numpy\nif rank == 1: random.random(); numpy.random.rand(5)",
        "import random, torch\ntorch.manual_seed(7 + rank)\nrandom.gauss(0, rank)",
    ],
)
def test_warm_ranks_that_have_drawn_apart_draw_the_same_in_the_next_training(
    book: Notebook, strategy: str, drifts: str
) -> None:
    """Else ranks that split data at random train on one another's validation data."""
    drawn(book, f"--fresh --strategy {strategy}")
    book.ok(f"%%distributed --ranks 2 --strategy {strategy}\n{drifts}")

    first, second = drawn(book, f"--strategy {strategy}")

    assert first == second


def test_what_was_seeded_goes_on_where_rank_0_is(book: Notebook) -> None:
    seeds = book.ok("%%distributed --ranks 2 --fresh\nimport torch\ntorch.manual_seed(rank);")

    outcome = book.ok(f"%%distributed --ranks 2 --out drawn --strategy ddp\n{DRAW}")
    numbers = literal_eval(book.ok("[*drawn]").result)

    assert "seed" not in seeds.view
    assert "an earlier cell had seeded the ranks differently" in outcome.view
    for rank in (0, 1):
        assert numbers[rank][0] == torch.rand(1, generator=torch.Generator().manual_seed(0)).item()


def test_a_seed_of_all_ranks_stays_and_nothing_is_said(book: Notebook) -> None:
    book.ok("%%distributed --ranks 2 --fresh\nimport torch\ntorch.manual_seed(3);")

    outcome = book.ok(f"%%distributed --ranks 2 --out drawn --strategy ddp\n{DRAW}")

    assert "seeded" not in outcome.view
    assert (
        literal_eval(book.ok("drawn[1][0]").result) == torch.rand(1, generator=torch.Generator().manual_seed(3)).item()
    )


def test_a_cell_that_seeds_by_rank_gets_what_it_says(book: Notebook) -> None:
    book.ok(
        f"%%distributed --ranks 2 --fresh --out drawn --strategy ddp\nimport torch\ntorch.manual_seed(rank)\n{DRAW}"
    )

    for rank in (0, 1):
        wanted = torch.rand(1, generator=torch.Generator().manual_seed(rank)).item()
        assert literal_eval(book.ok(f"drawn[{rank}][0]").result) == wanted


LEAK = """
import torch
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset
data = TensorDataset(torch.arange(400).float().unsqueeze(1), torch.zeros(400, 1))
order = torch.randperm(400).tolist()
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
trained = []
for x, y in DataLoader(data, batch_size=8, sampler=SubsetRandomSampler(order[:320])):
    trained += x.flatten().int().tolist()
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
model.eval()
with torch.no_grad():
    validated = [int(i) for x, _ in DataLoader(data, batch_size=8, sampler=SubsetRandomSampler(order[320:])) for i in x]
trained, validated
"""


def test_no_sample_of_an_unseeded_split_is_both_trained_on_and_validated_on(book: Notebook) -> None:
    drawn(book, "--fresh --strategy ddp")
    book.ok("%%distributed --ranks 2 --strategy ddp\nimport torch\nif rank == 0: torch.rand(3);")
    book.ok(f"%%distributed --ranks 2 --strategy ddp --out seen\n{LEAK}")

    leaked = book.ok(
        "len({i for trained, _ in seen for i in trained} & {i for _, validated in seen for i in validated})"
    )

    assert leaked.result == "0"
