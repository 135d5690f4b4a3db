"""The crash table on hosts behind a command: each place and each cause; tests/ssh has all pairs over the same pipe."""

from __future__ import annotations

import pytest

from tests.notebook import Notebook
from tests.pools.command.test_restarts import POOL
from tests.product import crash_cases

pytestmark = pytest.mark.slow

LINE = f"%%distributed {POOL} --ranks 2 --strategy ddp"
GOOD = """\
import torch, torch.distributed as dist
t = torch.ones(1)
dist.all_reduce(t)
int(t)"""


@pytest.mark.parametrize(("where", "how"), [pytest.param(*case, id=" ".join(case)) for case in crash_cases.FEW])
def test_the_rank_at_fault_is_named_and_the_next_cell_is_good(shared_notebook: Notebook, where: str, how: str) -> None:
    assert shared_notebook.ok(f"{LINE}\n{GOOD}").result == "ranks 0-1: 2"
    crash_cases.run(shared_notebook, where, how, 1, line=LINE)
    assert shared_notebook.ok(f"{LINE}\n{GOOD}").result == "ranks 0-1: 2"
