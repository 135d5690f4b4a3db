"""Process groups of two real ranks come and go over one store."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.notebook import ROOT

RANK = """
import os, sys, socket
import torch, torch.distributed as dist
from jupyter_distrib.wire.messages import WorkerOrder
from jupyter_distrib.interfaces import identity
from jupyter_distrib.worker.pytorch import process_group as group
rank, port, fd = map(int, sys.argv[1:4])
identity.assume(WorkerOrder(
    group="c", worker=f"c.{rank}", agent_pid=1, rank=rank, world_size=2, local_rank=rank, local_world_size=2
))
mine = group.Rendezvous(rank, 2)
group.install(mine)
mine.reset("127.0.0.1", port, fd)
os.environ |= identity.environment() | mine.environment() | identity.with_defaults({})

def total():
    x = torch.ones(1)
    dist.all_reduce(x)
    return x.item()

# three groups of the user's own, one after another, in each of two runs
for run in ("r-1", "r-2"):
    mine.begin(run)
    for _ in range(3):
        dist.init_process_group("gloo")
        assert total() == 2
        assert mine.sequence() == 0
        dist.destroy_process_group()
        assert mine.sequence() == -1
# the strategy's group is kept from run to run, and tolerates the user's own calls
mine.begin("r-3")
mine.ensure("gloo")
first = dist.group.WORLD
mine.begin("r-4")
mine.ensure("gloo")
assert dist.group.WORLD is first
dist.init_process_group("gloo")
dist.init_process_group()
assert dist.group.WORLD is first and mine.automatic
before = mine.sequence()
total()
assert mine.sequence() == before + 1
try:
    dist.init_process_group("nccl")
except ValueError as error:
    assert "already made" in str(error) and "gloo" in str(error), error
else:
    raise SystemExit("nccl was taken")
# what the user does to it makes it unfit for the next run
dist.new_group([0, 1])
assert not mine.automatic
mine.begin("r-5")
mine.ensure("gloo")
assert dist.group.WORLD is not first and total() == 2
dist.destroy_process_group()
mine.begin("r-6")
mine.ensure("gloo")
assert total() == 2
# the user's own group over the strategy's
dist.destroy_process_group()
dist.init_process_group("gloo", init_method="env://")
assert total() == 2 and not mine.automatic
mine.drop()
mine.drop()
assert not dist.is_initialized()
mine.tidy()
mine.tidy()
print("fine", flush=True)
"""


@pytest.mark.slow
def test_groups_come_and_go_in_two_ranks() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0), backlog=16) as listener:
        port, fd = listener.getsockname()[1], listener.fileno()
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", RANK, str(rank), str(port), str(fd if rank == 0 else -1)],
                pass_fds=[fd] if rank == 0 else [],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]
    outputs = [rank.communicate(timeout=50)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)
    assert all("fine" in output for output in outputs)
