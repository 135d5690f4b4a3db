"""Trainings over NCCL on two hosts that a command reaches, and what ends them. Both hosts are this machine, so their
ranks lease different GPUs of it."""

from __future__ import annotations

import os
import re
import signal
from textwrap import dedent

import pytest

from tests.feigned_cuda import FeignedCuda, trainings
from tests.gpu_bed.test_hosts import add_pool
from tests.notebook import Notebook

FAR = "--pool far"


@pytest.fixture(autouse=True, scope="module")
def far(the_book: Notebook) -> None:
    add_pool(the_book, more="--nodes 2")
    the_book.ok(trainings.cell(f"{FAR} --strategy ddp"))


def test_ranks_of_both_hosts_meet_over_nccl(machine: FeignedCuda, book: Notebook) -> None:
    found = book.ok(
        dedent(f"""\
            %%distributed {FAR} --gpus 4 --strategy ddp
            import os, torch
            t = torch.full((3,), 1.0 + rank, device=device)
            torch.distributed.all_reduce(t)
            os.environ['HOST'], t.tolist(), str(torch.distributed.get_backend_config())""")
    )
    for ranks, host in (("0-1", "a"), ("2-3", "b")):
        assert f"ranks {ranks}: ('{host}', [10.0, 10.0, 10.0], 'cpu:gloo,cuda:nccl')" in found.text
    contexts = list(machine.contexts().values())
    assert len(contexts) == len({gpu for (gpu,) in contexts}) == 4


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_it_trains_and_its_model_stays(strategy: str, book: Notebook) -> None:
    kept = f"{FAR} --strategy {strategy} --keep model,optimizer"
    assert "steps" in book.ok(trainings.cell(kept)).text
    assert "steps" in book.ok(trainings.cell(kept, model="import itertools, torch\n")).text


def test_the_exception_of_one_host_is_reported_at_once(book: Notebook) -> None:
    before = pids(book)
    raises = "if number == 50 and rank == 1: raise ValueError('of rank 1')"
    failed = book.fails(trainings.cell(f"{FAR} --strategy ddp", "itertools.count()", raises))
    assert failed.ename == "ValueError"
    assert "Rank 1 raised it" in failed.text
    assert "steps" in book.ok(trainings.cell(f"{FAR} --strategy ddp")).text
    assert pids(book) == before


def test_a_killed_rank_is_reported_with_its_host_and_replaced(book: Notebook) -> None:
    before = pids(book)
    book.start(trainings.cell(f"{FAR} --strategy ddp", "itertools.count()"))
    book.until("steps")
    os.kill(before[1], signal.SIGKILL)
    failed = book.finish()
    assert failed.ename == "RankLost"
    assert "rank 1" in failed.text
    assert "steps" in book.ok(trainings.cell(f"{FAR} --strategy ddp")).text
    assert pids(book)[1] != before[1]


def pids(book: Notebook) -> list[int]:
    found = book.ok(
        dedent(f"""\
            %%distributed {FAR} --gpus 2
            import os
            os.getpid()""")
    )
    return [int(word) for word in re.findall(r": (\d+)", found.text)]
