"""Where the time of a training goes: real kernels and ranks, loops whose parts last as long as a sleep."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from textwrap import dedent

import pytest

from tests.notebook import Notebook

pytestmark = pytest.mark.slow  # each trains for seconds

PARTS = """
import time, torch
from torch.utils.data import DataLoader, Dataset

STEPS = 40
DATA, FORWARD, BACKWARD, OPTIMIZER, REST = 0.004, 0.015, 0.02, 0.01, 0.012

class Slow(Dataset):
    def __len__(self): return 2 * STEPS
    def __getitem__(self, place): time.sleep(DATA / 2); return torch.ones(4)

class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(context, x): return x.clone()
    @staticmethod
    def backward(context, gradient): time.sleep(BACKWARD); return gradient.clone()

class SlowForward(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)
    def forward(self, x):
        time.sleep(FORWARD)
        return SlowBackward.apply(self.linear(x))

class SlowSGD(torch.optim.SGD):
    def step(self, *arguments):
        time.sleep(OPTIMIZER)
        super().step(*arguments)
"""
LOOP = """
began = time.perf_counter()
for batch in DataLoader(Slow(), batch_size=2):
    loss = model(batch).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(REST)
time.perf_counter() - began
"""


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    with Notebook(tmp_path_factory.mktemp("notebook")) as book:
        book.ok("%load_ext jupyter_distrib\nimport jupyter_distrib")
        yield book


def seconds(book: Notebook) -> dict[int, dict[str, float]]:
    found = book.ok("{r: dict(s) for r, s in jupyter_distrib.runs()[-1].shares.seconds.items()}").result
    return ast.literal_eval(found)  # type: ignore[no-any-return]


def test_the_parts_of_a_step_add_up_to_its_time(book: Notebook) -> None:
    shown = book.ok(
        f"%%distributed --ranks 1\n{PARTS}\nmodel = SlowForward()\noptimizer = SlowSGD(model.parameters(), lr=0.1)\n{LOOP}"
    )
    wall_s = float(shown.result.rpartition(": ")[2])
    parts = seconds(book)[0]

    assert sum(parts.values()) == pytest.approx(wall_s, rel=0.02)
    for name, sleep_s in {"data": 0.004, "forward": 0.015, "backward": 0.02, "optimizer": 0.01, "rest": 0.012}.items():
        assert 0.98 * 40 * sleep_s <= parts[name] < 40 * sleep_s + 0.1 * wall_s, (name, parts)


def test_the_slow_rank_of_a_strategy_is_named_with_what_it_is_slow_in(book: Notebook) -> None:
    slow = dedent("""\
        DATA = 0.06 if rank == 1 else 0.004
        model = SlowForward()
        optimizer = SlowSGD(model.parameters(), lr=0.1)""")
    shown = book.ok(f"%%distributed --ranks 2 --strategy ddp\n{PARTS}\nSTEPS = 80\n{slow}\n{LOOP}")

    assert "for rank 1, which is slow" in shown.text
    assert "slow in data loading" in shown.text
    assert "time: data" in shown.text
    assert "rank 0: data" in shown.text, "the picture's own words"


def test_a_loop_that_wraps_its_model_by_hand_is_measured_too(book: Notebook) -> None:
    slow = dedent("""\
        import os, torch.distributed as dist
        dist.init_process_group()
        FORWARD = 0.06 if rank == 0 else 0.005
        model = torch.nn.parallel.DistributedDataParallel(SlowForward())
        optimizer = SlowSGD(model.parameters(), lr=0.1)""")
    shown = book.ok(f"%%distributed --ranks 2\n{PARTS}\n{slow}\n{LOOP}dist.destroy_process_group()")

    assert "rank 1 waits" in shown.text
    assert "for rank 0, which is slow in the forward pass" in shown.text


def test_collectives_of_the_cell_count_and_a_detached_run_tells_them_too(book: Notebook) -> None:
    slow = dedent("""\
        import torch.distributed as dist
        model = SlowForward()
        optimizer = SlowSGD(model.parameters(), lr=0.1)
        REST = 0.06 if rank == 0 else 0.005""")
    loop = LOOP.replace("    optimizer.zero_grad()\n", "    dist.all_reduce(model.linear.weight.data)\n")
    book.ok(f"%%distributed --ranks 2 --strategy ddp --no-guess divided-data --detach\n{PARTS}\n{slow}\n{loop}")
    book.ok("jupyter_distrib.runs()[-1].result()")

    assert "which is slow in code between its steps" in book.ok("jupyter_distrib.runs()[-1].shares").result


@pytest.mark.timeout(300)
def test_a_rank_made_slow_by_hand_is_named_20_times_of_20(book: Notebook) -> None:
    causes = {
        "DATA": "data loading",
        "FORWARD": "the forward pass",
        "BACKWARD": "the backward pass",
        "OPTIMIZER": "the optimizer",
        "REST": "code between its steps",
    }
    # A training is told about from 2 s on; less is harder, and quicker.
    book.ok("from jupyter_distrib.kernel.analysis import shares\nshares.LEAST_S = 0.2")
    chance = random.Random(24)
    for place in range(20):
        slow, cause = chance.randrange(3), chance.choice(list(causes))
        fast = f"{', '.join(causes)} = {', '.join(['0.002'] * len(causes))}\nif rank == {slow}: {cause} = 0.1"
        model = "model = SlowForward()\noptimizer = SlowSGD(model.parameters(), lr=0.1)"
        shown = book.ok(f"%%distributed --ranks 3 --strategy ddp\n{PARTS}\nSTEPS = 30\n{fast}\n{model}\n{LOOP}")

        assert f"for rank {slow}, which is slow in {causes[cause]}" in shown.text, (place, slow, cause)
