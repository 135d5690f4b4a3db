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


def test_what_was_seeded_stays_seeded(book: Notebook) -> None:
    book.ok("%%distributed --ranks 2 --fresh --keep seed\nimport torch\nseed = rank\ntorch.manual_seed(seed);")

    numbers = drawn(book, "--strategy ddp")

    for rank in (0, 1):
        assert numbers[rank][0] == torch.rand(1, generator=torch.Generator().manual_seed(rank)).item()
