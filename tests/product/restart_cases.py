"""A cell with `--max-restarts` that loses its last rank, or the agent of that rank's node, in its first attempt: for
pools of every kind."""

from __future__ import annotations

from tests.notebook import Notebook

VICTIMS = {"rank": "os.getpid()", "agent": "os.getppid()"}
CELL = """%%distributed --strategy ddp --max-restarts 2
import os, signal, torch, torch.distributed as dist
ones = torch.ones(1)
dist.all_reduce(ones)
if rank == world_size - 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill({victim}, signal.SIGKILL)
dist.all_reduce(ones)
(int(ones), os.environ["TORCHELASTIC_RESTART_COUNT"])
"""


def check(book: Notebook, victim: str, ranks: int = 4) -> None:
    """Fail unless the cell, on the ranks of the default pool, ends right in its second attempt, and says why there is
    one."""
    outcome = book.cell(CELL.format(victim=VICTIMS[victim]), timeout_s=100)
    assert outcome.result == f"ranks 0-{ranks - 1}: ({ranks**2}, '1')", outcome.text
    assert "attempt 2 of 3, since rank" in outcome.text
