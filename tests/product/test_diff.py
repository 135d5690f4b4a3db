"""What `%distributed_diff` says of values that ranks keep: a real kernel and ranks."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import dedent

import pytest

from tests.notebook import Notebook

pytestmark = pytest.mark.slow  # a kernel and three ranks

MAKE = """%%distributed --ranks 3 --keep model,optimizer,step,other
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(70, 30), torch.nn.ReLU(), torch.nn.Linear(30, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model(torch.ones(2, 70)).sum().backward()
optimizer.step()
step = torch.tensor(3)
other = {"a": 1, "b": [torch.zeros(2), rank]}
"""


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    with Notebook(tmp_path_factory.mktemp("notebook")) as book:
        book.ok("%load_ext jupyter_distrib")
        yield book


def test_a_model_that_is_the_same_is_told_as_such(book: Notebook) -> None:
    book.ok(MAKE)

    assert book.ok("%distributed_diff model").result == "model is the same on ranks 0-2: 4 tensors and numbers"
    assert "optimizer is the same" in book.ok("%distributed_diff optimizer").result
    assert "step is the same" in book.ok("%distributed_diff 'step'  # of the training").result
    assert "the line is %distributed_diff NAME" in book.fails("%distributed_diff model step").evalue


def test_a_difference_is_named_with_its_ranks_and_its_first_element(book: Notebook) -> None:
    book.ok(MAKE)
    book.ok(
        dedent("""\
            %%distributed --ranks 3
            import torch
            if rank == 1:
                with torch.no_grad(): model[0].weight[17, 42:44] += 1e-3; model[2].bias.zero_()""")
    )

    lines = [line.strip() for line in book.ok("%distributed_diff model").result.splitlines()]
    assert lines[0] == "model differs on ranks 0-2: 2 of 4 tensors and numbers"
    assert lines[1] == "0.weight  [30, 70] float32"
    assert lines[2].startswith("ranks 0, 2: norm ")
    assert lines[3].startswith("rank 1: norm ")
    assert lines[4].startswith("first at [17, 42]: ")
    assert "2.bias  [1] float32" in lines
    assert "| 0 (rank 1)" in lines[-1]


def test_plain_values_are_compared_too(book: Notebook) -> None:
    book.ok(MAKE)

    shown = book.ok("%distributed_diff other").result
    assert "1 of 3" in shown
    assert "b.1" in shown
    assert "rank 2: 2" in shown


def test_sharded_values_are_refused_in_a_sentence(book: Notebook) -> None:
    book.ok(
        dedent("""\
            %%distributed --ranks 2 --strategy fsdp --keep sharded
            import torch
            sharded = torch.nn.Linear(8, 8)
            optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
            sharded(torch.ones(2, 8)).sum().backward()
            optimizer.step()""")
    )

    assert "each rank holds a different part" in book.fails("%distributed_diff sharded").evalue


def test_a_name_that_no_rank_keeps_is_refused(book: Notebook) -> None:
    book.ok("%reset -f")
    for line, told in {
        "": "needs the name of a value that --keep has kept on the ranks; no rank keeps a value: use --keep NAME",
        "nothing": "'nothing' is no name of this notebook; no rank keeps a value: use --keep NAME",
    }.items():
        assert told in book.fails(f"%distributed_diff {line}").evalue
    book.ok(
        dedent("""\
            %%distributed --ranks 2 --keep a,b
            a = b = rank
            plain = 1""")
    )
    book.ok("a")  # is `_` now
    book.ok("plain = 1")
    for line, told in {
        "": "needs the name of a value that --keep has kept on the ranks; choose a or b",
        "nothing": "'nothing' is no name of this notebook; choose a or b",
        "plain": "'plain' is not a value that --keep has kept on the ranks; choose a or b",
    }.items():
        assert book.fails(f"%distributed_diff {line}").evalue.endswith(told)
