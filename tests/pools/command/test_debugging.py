"""The debugger in ranks of two hosts, behind a coordinator."""

from __future__ import annotations

import sys
from textwrap import dedent

import pytest

from tests.notebook import Notebook

pytestmark = pytest.mark.slow
POOL = (
    "%distributed_pool add pair --kind command --hosts a:1,b:1 --nodes 2 --interface lo "
    f"--python {sys.executable} --start 'env HOST={{host}} {{python}}'\n"
)
ON_PAIR = "%%distributed --pool pair --ranks 2 --strategy ddp --timeout 60\n"


def test_a_rank_of_another_host_stops_at_a_breakpoint_and_is_examined_after_a_failure(notebook: Notebook) -> None:
    notebook.ok(POOL)
    cell = dedent("""\
        import os, torch
        t = torch.ones(1)
        if rank == 1:
            breakpoint()
        torch.distributed.all_reduce(t)
        t.item()""")
    notebook.start(ON_PAIR + cell, keyboard=True)
    notebook.types("p os.environ['HOST']", "t = t * 5", "c", prompt="rank 1 (Pdb) ")
    outcome = notebook.finish()
    assert outcome.status == "ok", outcome.text
    assert "'b'" in outcome.stdout
    assert "6.0" in outcome.result

    notebook.fails(
        ON_PAIR
        + dedent("""\
            found = 40 + rank
            if rank == 1: raise ValueError('one')
            import time
            time.sleep(60)""")
    )
    notebook.start("%distributed_debug", keyboard=True)
    notebook.types("p found", "q", prompt="rank 1 (Pdb) ")
    assert "\n41\n" in notebook.finish().stdout
