"""What becomes of ranks whose GPU does not take what comes next, on feigned GPUs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from textwrap import dedent

import pytest

from tests.gpu_bed import GpuBed
from tests.notebook import Notebook

pytestmark = pytest.mark.slow

ASSERT = "CUDA error: device-side assert triggered"
PID = """\
%%distributed --gpus 2
import os
print('pid', os.getpid())"""


@pytest.fixture(scope="module")
def bed() -> Iterator[GpuBed]:
    with GpuBed(count=2) as machine:
        yield machine


@pytest.fixture
def book(bed: GpuBed) -> Iterator[Notebook]:
    with bed.notebook() as one:
        yield one
    bed.state["synchronize"] = {"error": "", "seconds": 0.0}
    bed.write()


def pids(book: Notebook) -> list[str]:
    """By rank."""
    return [pid for _, pid in sorted(re.findall(r"\[(\d)\] pid (\d+)", book.ok(PID).view))]


def break_gpus(bed: GpuBed, *, error: str = "", seconds: float = 0.0) -> None:
    """Have every question whether a GPU has done its work be answered so."""
    bed.state["synchronize"] = {"error": error, "seconds": seconds}
    bed.write()


def test_a_rank_with_a_broken_context_is_replaced_and_the_cell_says_so(bed: GpuBed, book: Notebook) -> None:
    before = pids(book)
    book.ok("%%distributed --gpus 2 --keep w\nw = rank")
    break_gpus(bed, error=f"{ASSERT}\nCompile with TORCH_USE_CUDA_DSA")

    failed = book.fails(
        dedent(f"""\
            %%distributed --gpus 2
            import torch
            if rank == 1:
                raise torch.AcceleratorError({ASSERT!r})""")
    )
    break_gpus(bed)

    assert "device-side assert" in failed.traceback
    assert re.search(
        r"this broke the GPU context of rank 1 \(Cell In\[\d+\], line 4: CUDA error: device-side assert triggered\), "
        "so the rank is replaced, and its kept values are lost; .*--env CUDA_LAUNCH_BLOCKING=1",
        failed.view,
    )
    after = pids(book)
    assert after[0] == before[0]
    assert after[1] != before[1]
    assert "ValueLost" in book.fails("w[1]").ename
    assert book.ok("w[0]").result == "0"


def test_a_rank_whose_gpu_never_ends_its_work_is_replaced(bed: GpuBed, book: Notebook) -> None:
    before = pids(book)
    break_gpus(bed, seconds=60.0)

    cell = dedent("""\
        %%distributed --gpus 2
        if rank == 0:
            raise ValueError('mine')""")
    assert book.fails(cell).ename == "ValueError"

    after = pids(book)
    assert after[0] != before[0]


def test_a_rank_whose_gpu_is_sound_stays_with_what_it_keeps(book: Notebook) -> None:
    before = pids(book)
    book.ok("%%distributed --gpus 2 --keep w\nw = rank + 5")

    book.fails(
        dedent("""\
            %%distributed --gpus 2
            import torch
            raise torch.AcceleratorError('CUDA error: invalid argument')""")
    )

    assert pids(book) == before
    assert book.ok("w[1]").result == "6"
