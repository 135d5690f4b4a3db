"""64 hosts with 8 ranks each, simulated behind real pipes and a real coordinator: what they cost the kernel."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.notebook import Notebook
from tests.ray.conftest import write_trusted

HOSTS, RANKS, RUN_S = 64, 512, 5
COST = "[sum(__import__('os').times()[:2]), __import__('time').monotonic()]"
"""The kernel's processor time, and the clock."""


def pool() -> str:
    """Return settings that make 64 simulated hosts the default pool."""
    hosts = [f"h{number}:8" for number in range(HOSTS)]
    root = Path(__file__).parents[3]
    start = f"env PYTHONPATH={root} HOST={{host}} PYTHON={{python}} {sys.executable} -m {__package__}.simulated_host {RUN_S}"
    lines = ['pool = "many"', "[pools.many]", 'kind = "command"', f"hosts = {hosts}", f"start = {start!r}"]
    return "\n".join([*lines, f"ranks = {RANKS}", ""])


def share(book: Notebook) -> tuple[float, str]:
    """Run a cell on all ranks; return the kernel's share of a core meanwhile, and what the cell shows."""
    book.cell("%distributed_pool start", timeout_s=100)
    before = json.loads(book.ok(COST).result)
    result = book.cell("%%distributed\npass", timeout_s=100).view
    after = json.loads(book.ok(COST).result)
    return (after[0] - before[0]) / (after[1] - before[1]), result


@pytest.mark.slow
def test_512_ranks_on_64_hosts_leave_the_kernel_more_than_half_of_a_core(tmp_path: Path) -> None:
    write_trusted(tmp_path, pool())
    with Notebook(tmp_path, env={"JUPYTER_DISTRIB_VIEW": "widget"}) as book:
        book.ok("%load_ext jupyter_distrib")
        of_a_core, view = share(book)
    assert "512 ranks" in view, view[:500]
    assert of_a_core < 0.5
