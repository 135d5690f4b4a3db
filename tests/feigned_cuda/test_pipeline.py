"""Pipelines on GPUs: microbatches pass in the order of their schedule, and Stop keeps the ranks."""

from __future__ import annotations

import re

import pytest

from tests.feigned_cuda import FeignedCuda, trainings
from tests.notebook import Notebook

ORDERS = {
    "gpipe": ("F0 F1 F2 F3 B110 B111 B112 B113", "F10 F11 F12 F13 B B B B"),
    "1f1b": ("F0 F1 B110 F2 B111 F3 B112 B113", "F10 B F11 B F12 B F13 B"),
}
"""What two stages see in one step of four microbatches."""


@pytest.mark.parametrize("schedule", ORDERS)
@pytest.mark.parametrize(("ranks", "mesh"), [(2, "pp=2"), (4, "pp=2,data=2")])
def test_stages_pass_microbatches_on_in_the_order_of_the_schedule(
    ranks: int, mesh: str, schedule: str, machine: FeignedCuda, book: Notebook
) -> None:
    seen = "str(device), pipeline.stage, ' '.join(pipeline.module.seen[-8:])"
    found = book.ok(trainings.pipeline("range(3)", ranks, mesh, schedule) + seen)
    for rank in range(ranks):
        stage = rank if ranks == 2 else rank // 2
        assert f"rank {rank}: ('cuda:{rank}', {stage}, '{ORDERS[schedule][stage]}')" in found.text
    contexts = list(machine.contexts().values())
    assert len(contexts) == len({gpu for (gpu,) in contexts}) == ranks


def test_an_exception_in_one_stage_is_reported_and_the_ranks_stay(book: Notebook) -> None:
    before = pids(book)
    raises = "if number == 20 and rank == 1: raise ValueError('of stage 1')"
    failed = book.fails(trainings.pipeline("itertools.count()", then=raises))
    assert failed.ename == "ValueError"
    assert "Rank 1 raised it" in failed.text
    assert "steps" in book.ok(trainings.pipeline()).text
    assert pids(book) == before


def test_a_stage_without_memory_is_reported_and_the_ranks_stay(book: Notebook) -> None:
    before = pids(book)
    grows = "if number == 3 and rank == 1: torch.empty(9 << 30, device=device)"
    failed = book.fails(trainings.pipeline("itertools.count()", then=grows))
    assert "OutOfMemoryError" in failed.text
    assert "steps" in book.ok(trainings.pipeline()).text
    assert pids(book) == before


def pids(book: Notebook) -> list[str]:
    book.ok(trainings.pipeline())
    return re.findall(r": (\d+)", book.ok("%%distributed --gpus 2\nimport os\nos.getpid()").text)
