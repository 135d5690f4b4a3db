"""A driver that is slow, or tells less than all: CPU ranks know nothing of it, GPU ranks use what there is."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from textwrap import dedent

import pytest

from tests.gpu_bed import GIB, GpuBed
from tests.notebook import Notebook
from tests.processes import wait_until

pytestmark = pytest.mark.slow  # each test starts an agent of its own


@pytest.fixture
def book(bed: GpuBed) -> Iterator[Notebook]:
    with bed.notebook() as one:
        yield one


@pytest.mark.parametrize("memory", ["NOT_SUPPORTED", "NO_PERMISSION"])
def test_gpus_whose_memory_is_not_reported_are_used(bed: GpuBed, book: Notebook, memory: str) -> None:
    for gpu in bed.gpus:
        gpu["memory"] = memory
    bed.write()

    assert book.ok("%%distributed --ranks 2\n1").result == "ranks 0-1: 1"
    assert book.ok("%%distributed --gpus 2\nstr(device)").result.endswith("'cuda:1'")
    status = book.ok("%distributed_status").result
    assert ("unknown" in status) == (memory == "NO_PERMISSION"), "a GPU without memory of its own has the system's"


def test_a_lost_gpu_is_left_out_and_reported(bed: GpuBed, book: Notebook) -> None:
    bed.use(1, lost=True)

    assert book.ok("%%distributed --ranks 2\n1").result == "ranks 0-1: 1"
    outcome = book.ok(
        dedent("""\
            %%distributed --gpus 7
            import os
            os.environ['CUDA_VISIBLE_DEVICES']""")
    )
    assert "GPU 1 cannot be used (GPU is lost); it is left out." in outcome.view
    assert bed.gpus[0]["uuid"] in outcome.result, "by UUID, since numbers may have moved"
    refused = book.fails("%%distributed --gpus 8\n1")
    assert refused.evalue == (
        "--gpus 8 but 7 GPUs are visible here; ask for at most that many. GPU 1 cannot be used (GPU is lost)."
    )


def test_gpus_that_are_lost_while_ranks_are_up_end_nothing(bed: GpuBed, book: Notebook) -> None:
    book.ok("%%distributed --gpus 8\n1")
    bed.use(0, lost=True)

    assert book.ok("%%distributed --gpus 8\n1").result
    assert "7 GPUs are visible" in book.fails("%%distributed --gpus 8 --fresh\n1").evalue
    assert book.ok("%%distributed --ranks 2\n1").result


def test_a_rank_that_is_replaced_after_a_gpu_was_lost_is_on_its_own_gpu(bed: GpuBed, book: Notebook) -> None:
    """Numbers move up when the driver loses a GPU before them."""
    book.ok("import os; os.environ['CUDA_VISIBLE_DEVICES'] = '1,2,3'")
    book.ok("%%distributed --gpus 3\n1")
    bed.use(0, lost=True)
    first = min(bed.numbers(), key=lambda pid: bed.numbers()[pid])
    os.kill(first, signal.SIGKILL)
    assert wait_until(lambda: first not in bed.contexts() and len(bed.contexts()) == 3)

    assert sorted(bed.numbers().values()) == [[1], [2], [3]]
    assert book.ok("%%distributed --gpus 3\nstr(device)").result.splitlines()[0] == "rank 0: 'cuda:0'"
    assert bed.violations() == []


@pytest.mark.parametrize("error", ["LIB_RM_VERSION_MISMATCH", "NO_PERMISSION", "UNKNOWN"])
def test_a_broken_driver_means_cpu_ranks_that_are_reported(bed: GpuBed, error: str) -> None:
    bed.state["init"]["error"] = error
    bed.write()
    with bed.notebook() as book:
        outcome = book.ok("%%distributed\nstr(device)")
        assert outcome.result == "ranks 0-1: 'cpu'"
        assert "CPU ranks: the GPU driver does not work (" in outcome.view
        assert book.fails("%%distributed --gpus 1 --fresh\n1").evalue.startswith(
            "--gpus 1, but the GPU driver does not work ("
        )
        assert book.ok("%%distributed --ranks 2\n1").result == "ranks 0-1: 1"


def test_no_driver_means_cpu_ranks(bed: GpuBed) -> None:
    bed.state["init"]["error"] = "DRIVER_NOT_LOADED"
    bed.write()
    with bed.notebook() as book:
        outcome = book.ok("%%distributed --gpus 2\nstr(device)")
        assert outcome.result == "ranks 0-1: 'cpu'"
        assert "no GPU here: 2 CPU ranks (gloo)" in outcome.view


def test_a_slow_driver_holds_up_nobody_who_wants_cpu_ranks(bed: GpuBed) -> None:
    bed.state["init"]["seconds"] = driver_s = 12.0
    bed.write()
    with bed.notebook() as book:
        cpu = book.ok("%%distributed --ranks 2\n1")
        status = book.ok("%distributed_status")
        book.ok("%%distributed --gpus 8\n1")
        warm = book.ok("%distributed_status")

        assert cpu.wall_s + status.wall_s < driver_s, "they waited for it"
        assert warm.wall_s < driver_s, "it was opened once more"


HANGS = "the GPU driver has not answered for "
AT_ONCE_S = 5.0
"""Less than the time for which a cell waits for the driver."""


def hang(bed: GpuBed, *, on: bool = True) -> None:
    bed.state["hangs"] = on
    bed.write()


def test_only_the_first_cell_waits_for_a_driver_that_hangs(bed: GpuBed) -> None:
    hang(bed)
    with bed.notebook() as book:
        first = book.fails("%%distributed --gpus 2\n1")
        assert first.evalue.startswith(f"--gpus 2, but {HANGS}")
        assert first.evalue.count(".") == 1, "one sentence"
        assert first.wall_s < 25
        again = book.fails("%%distributed --gpus 2\n1")
        assert HANGS in again.evalue
        assert again.wall_s < AT_ONCE_S
        assert book.ok("%%distributed --ranks 2\n1").result == "ranks 0-1: 1"
        unasked = book.ok("%%distributed --fresh\nstr(device)")
        assert "'cpu'" in unasked.result
        assert f"CPU ranks: {HANGS}" in unasked.view
        assert HANGS in book.ok("%distributed_status").result
        hang(bed, on=False)
        assert wait_until(lambda: any(server.gpus for server in bed.status()))
        assert book.ok("%%distributed --gpus 8\nworld_size").result == "ranks 0-7: 8"


def test_a_driver_that_begins_to_hang_leaves_the_list_that_it_gave(bed: GpuBed, book: Notebook) -> None:
    book.ok("%%distributed --gpus 2\n1")
    hang(bed)
    first = book.ok("%%distributed --gpus 4 --fresh\nworld_size")
    assert first.result == "ranks 0-3: 4"
    assert HANGS in first.view
    again = book.ok("%%distributed --gpus 3 --fresh\nworld_size")
    assert again.result == "ranks 0-2: 3"
    assert again.wall_s < AT_ONCE_S
    assert bed.violations() == []


def test_a_cell_that_waits_for_the_driver_says_so_and_can_be_stopped(bed: GpuBed) -> None:
    hang(bed)
    with bed.notebook() as book:
        book.start("%%distributed --gpus 2\n1", "c-1")
        book.until("the GPU driver has not answered yet")
        book.interrupt()
        stopped = book.finish()
        assert stopped.ename == "KeyboardInterrupt"
        assert stopped.wall_s < AT_ONCE_S
        assert book.ok("%%distributed --ranks 2\n1").result == "ranks 0-1: 1"


def test_the_doctor_does_not_wait_for_a_driver_that_hangs(bed: GpuBed, book: Notebook) -> None:
    hang(bed)
    assert "GPU driver" in (found := book.ok("%distributed_status --doctor").text)
    assert "has not answered" in found


def test_the_driver_is_opened_once_and_asked_for_gpus_only(bed: GpuBed, book: Notebook) -> None:
    book.ok("%%distributed --gpus 8\n1")
    before = len(bed.calls())
    for _ in range(3):
        book.ok("%%distributed --ranks 2 --fresh\n1")
    assert len(bed.calls()) == before
    for _ in range(3):
        book.ok("%%distributed --gpus 4 --fresh\n1")

    assert len(bed.calls("nvmlInit")) == 1
    assert {thread for _, thread, _ in bed.calls()} == {"jupyter_distrib-gpus"}
    assert bed.calls("nvmlShutdown") == []


def test_cpu_ranks_do_not_hide_gpus(bed: GpuBed, book: Notebook) -> None:
    book.ok("%%distributed --ranks 2\n1")
    assert book.ok("%%distributed\nworld_size").result == "ranks 0-7: 8"


HOLDS = """\
%%distributed --gpus 1
import feigned_cuda, signal
feigned_cuda.hold(10 << 30)
signal.pause()"""


@pytest.mark.parametrize("pids", [True, False])
def test_memory_of_a_rank_is_reported_by_the_driver_and_by_its_allocator(
    bed: GpuBed, book: Notebook, pids: bool
) -> None:
    """In a container the driver lists no processes: its figure is what came with the rank, others' included."""
    bed.state["pids"] = pids
    bed.use(0, used_bytes=GIB // 2)
    book.start(HOLDS, "c-1")
    book.until(f"{10 * GIB + bed.state['context_bytes']}")
    book.until(f"'gpu_tensor_bytes': {10 * GIB}")
    book.until(f"'gpu_memory_of_all': {not pids}")
    book.interrupt()
    book.finish()


def test_where_the_driver_tells_no_memory_the_allocator_does(bed: GpuBed, book: Notebook) -> None:
    bed.use(0, memory="NO_PERMISSION")
    book.ok("import os; os.environ['CUDA_VISIBLE_DEVICES'] = '0'")
    bed.state["pids"] = False
    bed.write()
    book.start(HOLDS, "c-1")
    book.until(f"'gpu_memory_bytes': {10 * GIB}")
    book.interrupt()
    book.finish()


@pytest.mark.parametrize(
    "error",
    ["CUDA error: out of memory", "No CUDA GPUs are available", "CUDA error: uncorrectable ECC error\nCompile with"],
)
def test_a_gpu_that_fails_as_its_rank_starts_is_named_in_one_sentence(bed: GpuBed, book: Notebook, error: str) -> None:
    bed.state["set_device"]["error"] = error
    bed.write()

    refused = book.fails("%%distributed --gpus 2\n1")
    assert re.fullmatch(
        rf"rank ([01]) could not be started, because GPU \1 cannot be used \({error.partition(chr(10))[0]}\): nvidia-smi "
        r"shows its state; choose other GPUs with %env CUDA_VISIBLE_DEVICES=\.\.\., or CPU ranks with --ranks N\.",
        refused.evalue,
    )
    assert bed.ranks_gone()
    bed.state["set_device"]["error"] = ""
    bed.write()
    assert book.ok("%%distributed --gpus 8\nworld_size").result == "ranks 0-7: 8"


def test_a_driver_that_hangs_as_ranks_start_is_ended_by_stop(bed: GpuBed, book: Notebook) -> None:
    bed.state["set_device"]["seconds"] = 3600.0
    bed.write()
    book.start("%%distributed --gpus 2\n1", "c-1")
    assert wait_until(lambda: len([*(bed.folder / "groups").iterdir()]) == 2), "both wait for the driver"
    book.interrupt()
    assert book.finish().ename == "KeyboardInterrupt"
    assert wait_until(lambda: all(gpu.holder == "" for server in bed.status() for gpu in server.gpus))

    bed.state["set_device"]["seconds"] = 0.0
    bed.write()
    assert book.ok("%%distributed --gpus 8\nworld_size").result == "ranks 0-7: 8"


def test_threads_of_a_rank_choose_its_gpu_at_the_same_time(book: Notebook) -> None:
    """As those do that wait for the GPU and abort NCCL after a stop: an error would replace the rank."""
    chosen = book.ok(
        dedent("""\
            %%distributed --gpus 1
            import torch
            from concurrent.futures import ThreadPoolExecutor
            with ThreadPoolExecutor(8) as threads: chosen = [*threads.map(torch.cuda.set_device, [0] * 400)]
            len(chosen)""")
    )
    assert chosen.result == "rank 0: 400"
