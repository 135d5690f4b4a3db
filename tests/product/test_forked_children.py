"""A cell that forks, and whose child comes to the end of the cell as its rank does."""

from __future__ import annotations

from textwrap import dedent

import pytest

from tests.notebook import Notebook

pytestmark = pytest.mark.slow

FORKS = """\
%%distributed --ranks 2{flags}
import os, sys
child = os.fork()
if child == 0:
    {ends}
if child:
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
status if child else 'a second rank'"""


@pytest.mark.parametrize(
    ("ends", "status"),
    [
        ("sys.exit(3)", 3),
        ("sys.exit()", 0),
        ("sys.exit('why')", 1),
        ("raise ValueError('of the child')", 1),
        ("pass", 0),
    ],
)
@pytest.mark.parametrize("flags", ["", " --strategy ddp"])
def test_the_child_leaves_where_a_script_would(shared_notebook: Notebook, ends: str, status: int, flags: str) -> None:
    outcome = shared_notebook.ok(FORKS.format(flags=flags, ends=ends))

    assert outcome.result == f"ranks 0-1: {status}"
    assert ("ValueError: of the child" in outcome.view) == ("ValueError" in ends)
    assert ("why" in outcome.view) == ("why" in ends)
    after = shared_notebook.ok(
        dedent("""\
            %%distributed --ranks 2 --strategy ddp
            import torch, torch.distributed as dist
            t = torch.ones(1)
            dist.all_reduce(t)
            int(t)""")
    )
    assert after.result == "ranks 0-1: 2"
