"""After Stop, an exception, a death or an error of CUDA, the next cell trains; and on the same ranks where that can be."""

from __future__ import annotations

import os
import random
import re
import signal
import time

import pytest

from tests.feigned_cuda import FeignedCuda, trainings
from tests.notebook import Notebook
from tests.processes import wait_until

STOPS = int(os.environ.get("FEIGNED_CUDA_STOPS", "8"))
"""Number of random moments for Stop in one training."""
NEXT_S = 6.0
"""A cell after a stop takes at most this long, with the making of new groups."""


@pytest.fixture(autouse=True, scope="module")
def warm(the_book: Notebook) -> None:
    """Have everything loaded that a training needs."""
    the_book.ok(trainings.cell("--strategy fsdp"))
    the_book.ok(trainings.cell("--strategy ddp"))


def pids(book: Notebook) -> list[int]:
    book.ok("%%distributed --gpus 2 --out pids\nimport os\nos.getpid()")
    return [int(word) for word in re.findall(r"\d+", book.ok("print(list(pids))").stdout)]


def trains(book: Notebook, options: str = "--strategy ddp") -> None:
    found = book.ok(trainings.cell(options))
    assert "steps" in found.text
    assert found.wall_s < NEXT_S


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_stop_at_any_moment_keeps_the_ranks(strategy: str, machine: FeignedCuda, book: Notebook) -> None:
    seed = random.randrange(1000)
    moments = random.Random(seed)
    trains(book, f"--strategy {strategy}")
    before = pids(book)
    for number in range(STOPS):
        book.start(trainings.cell(f"--strategy {strategy}", "itertools.count()"))
        book.until("steps")
        moment_s = moments.uniform(0, 0.3)
        ended = time.monotonic() + moment_s
        wait_until(lambda ended=ended: time.monotonic() > ended, 1)
        book.interrupt()
        stopped = book.finish()
        story = f"seed {seed}, stop {number} after {moment_s:.3f} s: {stopped.text}"
        assert stopped.ename == "KeyboardInterrupt", story
        assert "frame #" not in stopped.text, story
        trains(book, f"--strategy {strategy}")
        assert pids(book) == before, story
    assert all(len(gpus) == 1 for gpus in machine.contexts().values())


def test_the_exception_of_one_rank_is_told_at_once(book: Notebook) -> None:
    trains(book)
    before = pids(book)
    raises = "if number == 50 and rank == 1: raise ValueError('of rank 1')"
    failed = book.fails(trainings.cell("--strategy ddp", "itertools.count()", raises))
    assert failed.ename == "ValueError"
    assert "Rank 1 raised it" in failed.text
    trains(book)
    assert pids(book) == before


def test_a_script_that_destroys_its_group_holds_up_nobody(book: Notebook) -> None:
    """The usual end of a script for torchrun, while a collective waits for a rank that has raised."""
    script = """%%distributed --gpus 2 --keep w
import torch, torch.distributed as dist
w = torch.ones(2, device=device)
dist.init_process_group("nccl", device_id=device)
try:
    t = torch.ones(2, device=device)
    dist.all_reduce(t)
    for number in range(100):
        if number == 20 and rank == 1: {at_20}
        dist.all_reduce(t)
    torch.cuda.synchronize()
finally:
    dist.destroy_process_group()
"""
    book.ok("%%distributed --gpus 2 --keep w\nimport torch\nw = torch.ones(2, device=device)")
    before = pids(book)
    failed = book.fails(script.format(at_20="raise ValueError('of rank 1')"))
    assert failed.ename == "ValueError"
    assert failed.wall_s < 3
    assert pids(book) == before
    book.start(script.format(at_20="print('waits', flush=True); __import__('signal').pause()"))
    book.until("waits")
    book.interrupt()
    stopped = book.finish()
    assert stopped.ename == "KeyboardInterrupt"
    assert pids(book) == before
    trains(book)


def test_a_killed_rank_is_replaced(book: Notebook) -> None:
    trains(book)
    before = pids(book)
    book.start(trainings.cell("--strategy ddp", "itertools.count()"))
    book.until("steps")
    os.kill(before[1], signal.SIGKILL)
    failed = book.finish()
    assert failed.ename == "RankLost"
    assert "rank 1" in failed.text
    trains(book)


def test_a_kernel_that_never_ends_costs_its_rank_alone(machine: FeignedCuda, book: Notebook) -> None:
    trains(book)
    before = pids(book)
    book.start(
        "%%distributed --gpus 2\nimport torch\n"
        "if rank == 1:\n    torch.cuda._sleep(1 << 50)\n    print('spins', flush=True)\n    torch.ones(1, device=device).item()"
    )
    book.until("spins")
    book.interrupt()
    stopped = book.finish()
    assert stopped.ename == "KeyboardInterrupt"
    trains(book)
    after = pids(book)
    assert after[0] == before[0]
    assert after[1] != before[1]


@pytest.mark.parametrize("strategy", ["none", "ddp"])
def test_a_context_that_is_lost_is_told_and_its_rank_replaced(strategy: str, book: Notebook) -> None:
    trains(book)
    before = pids(book)
    failed = book.fails(
        f"%%distributed --gpus 2 --strategy {strategy}\nimport os, torch\n"
        "if rank == 1: os.environ['FEIGNED_CUDA_BREAK'] = 'ndex'\n"
        "t = torch.zeros(3, device=device)[torch.tensor([1], device=device)]\n"
        "torch.cuda.synchronize()\n"
    )
    assert "illegal memory access" in failed.text
    assert "ank 1" in failed.text
    trains(book)
    after = pids(book)
    assert after[1] != before[1]
