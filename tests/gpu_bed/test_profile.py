"""`--profile` on a GPU whose driver has no profiler: what runs on the host is recorded, and what the GPU's allocator does."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu_bed import GpuBed
from tests.notebook import Notebook
from tests.product.test_profile import trace, training

pytestmark = pytest.mark.slow  # each test starts an agent of its own

HEAD = "%%distributed --gpus 1 --profile 4\nimport feigned_cuda"
HOLDS = "feigned_cuda.hold(step << 20)"


@pytest.fixture(scope="module")
def bed() -> Iterator[GpuBed]:
    with GpuBed(count=1) as machine:
        yield machine


@pytest.fixture(scope="module")
def book(bed: GpuBed) -> Iterator[Notebook]:
    with bed.notebook() as one:
        yield one


def history(book: Notebook) -> list[tuple[str, int]]:
    """Return what the newest run has taken of the GPU's memory, and given back, in MB; empty if it was not written."""
    newest = max(folder(book).glob("runs/*"), key=lambda path: path.stat().st_mtime_ns)
    paths = list(newest.glob("memory-rank0.pickle"))
    (entries,) = pickle.loads(paths[0].read_bytes())["device_traces"] if paths else ([],)
    return [(entry["action"], entry["size"] >> 20) for entry in entries]


def folder(book: Notebook) -> Path:
    return Path(book.ok("import os; print(os.getcwd())").stdout.strip())


def test_a_gpu_without_a_profiler_leaves_a_trace_of_the_host_and_the_history_of_its_memory(book: Notebook) -> None:
    earlier = "import torch\nearlier = torch.ones(9)"  # to free it while memory is recorded is no warning
    shown = book.ok(f"{HEAD}\n{earlier}\n{training(extra=f'{HOLDS}; earlier = None')}")

    assert "steps 4-7 on rank 0" in shown.text
    assert "memory-rank0.pickle is the history of its GPU's memory" in shown.text
    assert "[0!]" not in shown.text  # nothing in standard error
    assert "memory of tensors" in {event["name"] for event in trace(folder(book)) if event["ph"] == "C"}
    # Step 4 begins when the third optimizer step has ended, before the third `hold`.
    assert history(book) == [("alloc", step) for step in range(3, 7)]


def test_a_rank_that_is_stopped_writes_no_history_of_memory(book: Notebook) -> None:
    """It would take longer to write than a rank has that is stopped. The signal may overtake what explains it; here it
    surely does."""
    limit = "from jupyter_distrib.worker.pytorch import profiler\nprofiler.STEPS_S = 600.0"
    book.ok(f"%%distributed --gpus 1\n{limit}")
    ready = f"{HOLDS}\n    if step == 6: print('at step', step); signal.raise_signal(signal.SIGINT)"
    book.start(f"{HEAD.replace('4', '900')}\nimport signal\n{training(1000, ready)}".replace("rank == 1", "True"))
    book.until("at step 6")
    book.interrupt()

    assert "shows steps 4-" in book.finish().text
    assert history(book) == []
