"""Groups after a run that did not end well, where NCCL is in them: all ranks abort, none destroys. On feigned GPUs, with
groups of gloo that say they are NCCL's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from tests.gpu_bed import GpuBed
from tests.notebook import Notebook

pytestmark = pytest.mark.slow

FEIGNED = """%%distributed --gpus 2
from jupyter_distrib.worker.pytorch import private, process_group

def recorded(name, original):
    def call(*arguments):
        with open(f"calls {rank}", "a") as file:
            print(name, file=file)
        return original(*arguments)
    return call

process_group.default_backend = lambda device: "gloo"
private.backends = lambda group: "cpu:gloo,cuda:nccl"
private.abort_groups = recorded("abort", private.abort_groups)
process_group._torch_destroy = recorded("destroy", process_group._torch_destroy)"""
HEAD = "%%distributed --gpus 2 --strategy ddp\nimport torch, torch.distributed as dist\n"
LOOP = """\
print('ready', rank, flush=True)
step = 0
while True:
    dist.all_reduce(torch.ones(1))
    step += 1
"""
ALONE = "if rank == 1: dist.all_reduce(torch.ones(1))"
GOOD = f"{HEAD}import os\nt = torch.ones(1)\ndist.all_reduce(t)\nprint('pid', os.getpid())\nint(t)"


@pytest.fixture(scope="module")
def bed() -> Iterator[GpuBed]:
    with GpuBed(count=2) as machine:
        yield machine


@pytest.fixture
def book(bed: GpuBed, tmp_path: Path) -> Iterator[Notebook]:
    with bed.notebook() as one:
        one.ok(f"import os; os.chdir({str(tmp_path)!r})")
        one.ok(FEIGNED)
        yield one
    bed.state["synchronize"] = {"error": "", "seconds": 0.0}
    bed.write()


def trained(book: Notebook) -> list[str]:
    """Meet in a collective; return the pids."""
    outcome = book.ok(GOOD)
    assert outcome.result == "ranks 0-1: 2"
    return sorted(re.findall(r"pid (\d+)", outcome.view))


def calls(folder: Path, rank: int) -> list[str]:
    path = folder / f"calls {rank}"
    return path.read_text().split() if path.exists() else []


def test_after_a_stop_all_ranks_abort_and_the_next_cell_trains(book: Notebook, tmp_path: Path) -> None:
    before = trained(book)

    book.start(f"{HEAD}print('ready', rank, flush=True)\nimport signal\n{ALONE}\nsignal.pause()")
    book.until("ready 0")
    book.until("ready 1")
    book.interrupt()

    assert book.finish().ename == "KeyboardInterrupt"
    assert trained(book) == before
    assert [calls(tmp_path, rank) for rank in (0, 1)] == [["abort"], ["abort"]]


@pytest.mark.parametrize("ends", ["import signal\nsignal.pause()", "raise ValueError('of all')"])
def test_the_group_stays_if_all_ranks_have_come_equally_far(book: Notebook, tmp_path: Path, ends: str) -> None:
    """NCCL's take seconds to make."""
    before = trained(book)
    book.ok(f"{HEAD}import sys\nsys.group = dist.group.WORLD")

    book.start(f"{HEAD}dist.all_reduce(torch.ones(1))\nprint('ready', rank, flush=True)\n{ends}")
    book.until("ready 0")
    book.until("ready 1")
    if "pause" in ends:
        book.interrupt()

    assert book.finish().ename in ("KeyboardInterrupt", "ValueError")
    assert book.ok(f"{HEAD}import sys\nsys.group is dist.group.WORLD").result == "ranks 0-1: True"
    assert trained(book) == before
    assert [calls(tmp_path, rank) for rank in (0, 1)] == [[], []]


def test_a_model_that_is_kept_over_such_a_stop_goes_on_alike_on_all_ranks(book: Notebook, tmp_path: Path) -> None:
    """The ranks were stopped at other lines, and one had changed its weights by then."""
    wrapped = "torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))"
    book.ok(f"{HEAD}dist.init_process_group()\nmodel = {wrapped}\n".replace("ddp", "ddp --keep model"))
    book.fails(f"{HEAD}with torch.no_grad(): model.module.weight.fill_(rank + 5.0)\nraise ValueError('of all')")

    read = f"{HEAD}model(torch.ones(1, 1)).sum().backward()\nmodel.module.weight.item()"
    assert book.ok(read).result == "ranks 0-1: 5.0"
    assert [calls(tmp_path, rank) for rank in (0, 1)] == [[], []]


def test_after_an_exception_of_one_rank_all_ranks_abort(book: Notebook, tmp_path: Path) -> None:
    before = trained(book)

    failed = book.fails(HEAD + LOOP + "    if rank == 1 and step == 50: raise ValueError('mine')")

    assert failed.ename == "ValueError"
    assert trained(book) == before
    assert [calls(tmp_path, rank) for rank in (0, 1)] == [["abort"], ["abort"]]


SCRIPT = """%%distributed --gpus 2
import torch, torch.distributed as dist
dist.init_process_group()
try:
    for step in range(10**9):
        dist.all_reduce(torch.ones(1))
        if step == 50:
            print("ready", rank, flush=True)
            {at_50}
finally:
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("ends", ["raises", "stopped", "returns"])
def test_a_script_that_destroys_its_group_in_the_end_never_waits_for_ranks_that_do_not_come(
    book: Notebook, tmp_path: Path, ends: str
) -> None:
    before = trained(book)
    at_50 = {"raises": "if rank == 1: raise ValueError('mine')", "stopped": "pass", "returns": "break"}[ends]
    book.start(SCRIPT.format(at_50=at_50))
    if ends == "stopped":
        book.until("ready 0")
        book.interrupt()
    outcome = book.finish()

    assert outcome.ename == {"raises": "ValueError", "stopped": "KeyboardInterrupt", "returns": ""}[ends]
    # The first call makes way for the script's own group.
    assert {call for rank in (0, 1) for call in calls(tmp_path, rank)[1:]} == {
        "destroy" if ends == "returns" else "abort"
    }
    assert trained(book) == before


def test_a_rank_that_had_ended_aborts_with_the_one_that_is_stopped(book: Notebook, tmp_path: Path) -> None:
    before = trained(book)

    book.start(f"{HEAD}print('ready', rank, flush=True)\nif rank == 1: dist.all_reduce(torch.ones(1))")
    book.until("ready 1")
    book.interrupt()

    assert book.finish().ename == "KeyboardInterrupt"
    assert trained(book) == before
    assert [calls(tmp_path, rank) for rank in (0, 1)] == [["abort"], ["abort"]]


def test_ranks_that_wait_for_one_that_has_left_are_stopped_and_told_so(book: Notebook, tmp_path: Path) -> None:
    before = trained(book)

    left = book.fails(f"{HEAD}import sys\nif rank == 0: sys.exit(0)\ndist.all_reduce(torch.ones(1))")

    assert "Rank 0 had left the cell early with sys.exit()" in left.traceback
    assert trained(book) == before
    assert [calls(tmp_path, rank) for rank in (0, 1)] == [["abort"], ["abort"]]


def test_a_rank_that_nccl_does_not_let_go_of_is_replaced(book: Notebook) -> None:
    before = trained(book)
    book.ok(
        dedent("""\
            %%distributed --gpus 2
            import time
            from jupyter_distrib.worker.pytorch import private, process_group
            process_group.GIVE_UP_S = 0.2
            if rank == 1: private.abort_groups = lambda: time.sleep(600)""")
    )

    book.fails(HEAD + LOOP + "    if rank == 1 and step == 50: raise ValueError('mine')")
    book.ok(FEIGNED)

    after = trained(book)
    assert len(set(after) & set(before)) == 1


def test_work_that_waits_for_others_is_aborted_and_a_kept_value_in_the_midst_of_it_is_named(
    bed: GpuBed, book: Notebook, tmp_path: Path
) -> None:
    """Every rank has ended the cell by itself: nobody was cut."""
    book.ok(
        dedent("""\
            %%distributed --gpus 2 --strategy ddp --keep w,v
            import torch
            w, v = torch.ones(2), [1]""")
    )
    bed.state["synchronize"] = {"error": "", "seconds": 3.0}
    bed.write()
    book.fails(f"{HEAD}w\nraise ValueError('mine')")

    read = book.ok(
        dedent("""\
            %%distributed --gpus 2
            w, v
            rank""")
    )

    assert re.search(r"`w` was in the middle of a step when Cell In\[\d+\] ended: load a checkpoint", read.view)
    assert "`v`" not in read.view
    assert [calls(tmp_path, rank) for rank in (0, 1)] == [["abort"], ["abort"]]
