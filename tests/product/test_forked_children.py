"""A cell that forks, and whose child comes to the end of the cell as its rank does."""

from __future__ import annotations

import pytest

from tests.notebook import Notebook

pytestmark = pytest.mark.slow

FORKS = (
    "%%distributed --ranks 2{flags}\nimport os, sys\nchild = os.fork()\nif child == 0:\n    {ends}\n"
    "if child:\n    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])\nstatus if child else 'a second rank'"
)


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
        "%%distributed --ranks 2 --strategy ddp\nimport torch, torch.distributed as dist\nt = torch.ones(1)\n"
        "dist.all_reduce(t)\nint(t)"
    )
    assert after.result == "ranks 0-1: 2"
