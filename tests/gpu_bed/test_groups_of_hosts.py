"""Groups over two hosts after a run that did not end well, where NCCL is in them: one decision for the ranks of all
hosts. The hosts are this machine behind pipes, on feigned GPUs, with groups of gloo that say they are NCCL's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from tests.gpu_bed import GpuBed
from tests.gpu_bed.test_hosts import add_pool
from tests.notebook import Notebook
from tests.worker.pytorch.test_nccl_plan import FEIGNED, calls

pytestmark = pytest.mark.slow


def on(size: int, cell: str = "", options: str = "--strategy ddp") -> str:
    return (
        f"%%distributed --pool far --gpus {size} {options}\nimport os, signal, torch, torch.distributed as dist\n{cell}"
    )


MEET = """\
t = torch.ones(1)
dist.all_reduce(t)
print('pid', os.getpid())
int(t)"""
READY = "print('ready', rank, flush=True)\n"


@pytest.fixture(scope="module")
def bed() -> Iterator[GpuBed]:
    with GpuBed(count=8) as machine:  # both hosts see the GPUs of ranks that are leaving as free
        yield machine


@pytest.fixture(scope="module")
def far(bed: GpuBed) -> Iterator[Notebook]:
    with bed.notebook() as book:
        add_pool(book, more="--nodes 2")
        yield book


@pytest.fixture(scope="module", params=[2, 4])
def size(request: pytest.FixtureRequest) -> int:
    """The number of ranks on two hosts: one each, or two each."""
    number: int = request.param
    return number


@pytest.fixture(scope="module")
def feigned(far: Notebook, size: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what the ranks have called."""
    folder = tmp_path_factory.mktemp("calls")
    cell = FEIGNED.replace("--gpus 2", f"--pool far --gpus {size} --fresh").replace('f"calls', f'f"{folder}/calls')
    far.ok(cell)
    return folder


@pytest.fixture
def book(far: Notebook, feigned: Path) -> Notebook:
    for path in feigned.iterdir():
        path.unlink()
    return far


def trained(book: Notebook, size: int) -> list[str]:
    """Meet in a collective; return the pids."""
    outcome = book.ok(on(size, MEET))
    assert outcome.result == f"ranks 0-{size - 1}: {size}"
    return sorted(re.findall(r"pid (\d+)", outcome.view))


def stopped(book: Notebook, size: int, cell: str) -> None:
    book.start(on(size, READY + cell))
    for rank in range(size):
        book.until(f"ready {rank}")
    book.interrupt()
    assert book.finish().ename == "KeyboardInterrupt"


def all_calls(folder: Path, size: int) -> list[list[str]]:
    return [calls(folder, rank) for rank in range(size)]


@pytest.mark.parametrize("waits", ["first", "last"])
def test_after_a_stop_all_ranks_of_both_hosts_abort_and_stay(
    book: Notebook, size: int, feigned: Path, waits: str
) -> None:
    """The rank that waits does so for one on the other host, which has ended the cell by then."""
    before = trained(book, size)
    stopped(
        book, size, f"if rank == {0 if waits == 'first' else size - 1}: dist.all_reduce(torch.ones(1))\nsignal.pause()"
    )
    assert trained(book, size) == before
    assert all_calls(feigned, size) == [["abort"]] * size


def test_after_an_exception_of_one_rank_all_ranks_of_both_hosts_abort_and_stay(
    book: Notebook, size: int, feigned: Path
) -> None:
    before = trained(book, size)
    loop = dedent("""\
        step = 0
        while True:
            dist.all_reduce(torch.ones(1))
            step += 1
    """)
    failed = book.fails(on(size, f"{loop}    if rank == {size - 1} and step == 50: raise ValueError('mine')"))
    assert failed.ename == "ValueError"
    assert trained(book, size) == before
    assert all_calls(feigned, size) == [["abort"]] * size


@pytest.mark.parametrize("ends", ["signal.pause()", "raise ValueError('of all')"])
def test_the_groups_stay_if_the_ranks_of_both_hosts_have_come_equally_far(
    book: Notebook, size: int, feigned: Path, ends: str
) -> None:
    before = trained(book, size)
    book.ok(on(size, "import sys\nsys.group = dist.group.WORLD"))
    if "pause" in ends:
        stopped(book, size, f"dist.all_reduce(torch.ones(1))\n{READY}{ends}".replace(READY, ""))
    else:
        book.fails(on(size, f"dist.all_reduce(torch.ones(1))\n{ends}"))
    assert book.ok(on(size, "import sys\nsys.group is dist.group.WORLD")).result == f"ranks 0-{size - 1}: True"
    assert trained(book, size) == before
    assert all_calls(feigned, size) == [[]] * size


def test_a_host_whose_gpus_have_not_finished_has_those_of_the_other_abort_too(
    book: Notebook, bed: GpuBed, size: int, feigned: Path
) -> None:
    trained(book, size)
    book.ok(on(size, "w = torch.ones(2)", "--keep w"))
    held = "import feigned_cuda, time\nif rank == 0: torch.cuda.synchronize = lambda *_: time.sleep(1)\n"
    book.fails(on(size, f"w\n{held}raise ValueError('of all')"))
    assert "`w` was in the middle of a step" in book.ok(on(size, "w\nrank", "")).view
    trained(book, size)
    assert all_calls(feigned, size) == [["abort"]] * size


def test_a_host_that_dies_before_it_has_reported_is_named_and_the_next_cell_has_others(far: Notebook) -> None:
    far.ok(on(2, "", "--fresh"))
    agents = far.ok(on(2, "int(os.environ['JUPYTER_DISTRIB_AGENT'].partition('.')[0])", "")).result
    agent = re.findall(r"(\d+)$", agents, re.MULTILINE)[1]
    dies = f"import time\nif rank == 1: torch.cuda.synchronize = lambda *_: (os.kill({agent}, 9), time.sleep(60))\n"
    far.fails(on(2, f"{dies}raise ValueError('of all')", ""))
    lost = far.cell(on(2, "rank", ""))
    assert lost.status == "ok" or "because node b was lost: its agent has ended" in lost.text
    assert far.ok(on(2, "rank", "")).result == "rank 0: 0\nrank 1: 1"
