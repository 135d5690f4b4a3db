"""NCCL does not start: the cell fails with the rank and what to try, nobody hangs, and the next cell trains."""

from __future__ import annotations

import pytest

from tests.feigned_cuda import FeignedCuda, trainings
from tests.notebook import Notebook

CUDA, SYSTEM, INTERNAL, USAGE, REMOTE = 1, 2, 3, 5, 6
"""Numbers of NCCL's errors."""
NO_ROUTE = "socketStartConnect: Connect to 10.1.2.3<40000> failed : No route to host"
SEGMENT = "Error while creating shared memory segment /dev/shm/nccl-WU88OE (size 9637888)"
INTERFACES = "--env NCCL_SOCKET_IFNAME=NAME names another, --env NCCL_DEBUG=INFO tells more."
FAILS = "if rank in {ranks}: __import__('os').environ.update(FEIGNED_CUDA_JOIN_FAILS='{error}', FEIGNED_CUDA_JOIN_SAYS={says!r})"
GROUP = """%%distributed --gpus 2 --fresh
import torch, torch.distributed as dist
{first}
dist.init_process_group("nccl"{bound})
dist.all_reduce(torch.ones(2, device=device))
{second}
dist.all_reduce(torch.ones(2, device=device), group=dist.new_group([0, 1]))
torch.cuda.synchronize()
"""


def fails(error: int, says: str, ranks: str) -> str:
    return FAILS.format(ranks=ranks, error=error, says=says)


def trains(book: Notebook) -> None:
    assert "steps" in book.ok(trainings.cell("--strategy ddp")).text


@pytest.mark.parametrize("ranks", ["(0, 1)", "(1,)"])
@pytest.mark.parametrize(
    ("error", "says", "hint"),
    [
        (CUDA, "Cuda failure 2 'out of memory'", "as on a GPU that is full: %distributed_status"),
        (SYSTEM, NO_ROUTE, INTERFACES),
        (SYSTEM, SEGMENT, "/dev/shm has "),
        (INTERNAL, "", INTERFACES),
        (USAGE, "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000", "two ranks have used one GPU"),
        (REMOTE, "", INTERFACES),
    ],
)
def test_a_rank_that_does_not_join_is_told_with_a_hint(
    book: Notebook, error: int, says: str, hint: str, ranks: str
) -> None:
    model = f"{fails(error, says, ranks)}\n{trainings.MODEL}"
    failed = book.fails(trainings.cell("--strategy ddp --fresh", "itertools.count()", model=model))
    assert failed.ename == "DistBackendError"
    assert hint in failed.text, failed.text
    assert "DistBackendError: NCCL: " in failed.view or error == REMOTE, "that error tells of another rank"
    assert (says or "error") in failed.text
    assert ("Ranks 0-1 raised the same" if ranks == "(0, 1)" else "Rank 1 raised it") in failed.text
    trains(book)


@pytest.mark.parametrize("bound", ["", ", device_id=device"])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("ranks", ["(0, 1)", "(1,)"])
def test_a_group_of_the_cell_is_not_joined(
    machine: FeignedCuda, book: Notebook, bound: str, first: bool, ranks: str
) -> None:
    """The first group of all ranks, and one that is split off from it."""
    broken = fails(SYSTEM, NO_ROUTE, ranks)
    failed = book.fails(GROUP.format(bound=bound, first=broken if first else "", second="" if first else broken))
    assert failed.ename == "DistBackendError"
    assert INTERFACES in failed.text
    trains(book)
    assert all(len(gpus) == 1 for gpus in machine.contexts().values())


def test_a_training_that_cannot_join_at_first_is_started_again(book: Notebook) -> None:
    broken = f"if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n    {fails(SYSTEM, NO_ROUTE, '(1,)')}"
    unset = "else: os.environ.pop('FEIGNED_CUDA_JOIN_FAILS', None)"
    again = book.ok(
        trainings.cell(
            "--strategy ddp --fresh --max-restarts 1 --restart-on error",
            model=f"import os\n{broken}\n{unset}\n{trainings.MODEL}",
        )
    )
    assert "attempt 2 of 2" in again.text
