"""Stop over hosts with one rank each: whoever is waited for may have ended the cell. Real kernels; the hosts are this
machine behind pipes."""

from __future__ import annotations

import re

import pytest

from tests.notebook import Notebook
from tests.pools.command.test_restarts import POOL

pytestmark = pytest.mark.slow

HEAD = f"%%distributed {POOL} --ranks 2 --strategy ddp\nimport os, signal, torch, torch.distributed as dist\n"
PIDS = """\
t = torch.ones(1)
dist.all_reduce(t)
print('pid', os.getpid())
int(t)"""


def pids(notebook: Notebook) -> list[str]:
    outcome = notebook.ok(HEAD + PIDS)
    assert outcome.result == "ranks 0-1: 2"
    return sorted(re.findall(r"pid (\d+)", outcome.view))


@pytest.mark.parametrize("waits", [0, 1])
@pytest.mark.parametrize("ends", ["stop", "exception"])
def test_a_rank_that_waits_for_one_of_another_host_which_has_ended_the_cell_is_freed(
    shared_notebook: Notebook, waits: int, ends: str
) -> None:
    before = pids(shared_notebook)
    ready = f"print('ready', rank, flush=True)\nif rank == {waits}: dist.all_reduce(torch.ones(1))\n"
    if ends == "exception":
        shared_notebook.fails(f"{HEAD}{ready}raise ValueError('mine')")
    else:
        shared_notebook.start(f"{HEAD}{ready}signal.pause()")
        shared_notebook.until("ready 0")
        shared_notebook.until("ready 1")
        shared_notebook.interrupt()
        assert shared_notebook.finish().ename == "KeyboardInterrupt"
    assert pids(shared_notebook) == before, "no rank had to be killed"
