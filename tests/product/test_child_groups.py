"""Programs that a cell starts, and that make a process group of their own from the environment that they inherit."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from tests.notebook import Notebook

pytestmark = pytest.mark.slow

PROGRAM = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
t = torch.ones(1) + dist.get_rank()
dist.all_reduce(t)
print("sum", int(t), flush=True)
dist.destroy_process_group()
"""


def test_programs_of_all_ranks_meet_as_often_as_they_are_started(notebook: Notebook, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)

    for times in (2, 1):
        programs = "\n!{sys.executable} train.py" * times
        outcome = notebook.ok(f"%%distributed --ranks 2 --strategy ddp --timeout 60\nimport sys{programs}")
        assert outcome.view.count("sum 3") >= times, outcome.view  # ranks that print the same are shown once
    own = notebook.ok(
        dedent("""\
            %%distributed --ranks 2 --strategy ddp
            import torch, torch.distributed as dist
            t = torch.ones(1)
            dist.all_reduce(t)
            int(t)""")
    )
    assert own.result == "ranks 0-1: 2"
