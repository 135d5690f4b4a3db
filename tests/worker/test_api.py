"""What a cell calls on a rank loads nothing of the kernel's side."""

from __future__ import annotations

import pytest

from tests.notebook import Notebook

CELL = """%%distributed --ranks 2 --strategy ddp
import sys
import jupyter_distrib
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = jupyter_distrib.prepare(model, optimizer)
jupyter_distrib.report(loss=1.0)
list(jupyter_distrib.progress(range(2)))
jupyter_distrib.total(1, 2)
jupyter_distrib.save("checkpoint", model=model)
jupyter_distrib.load("checkpoint", model=model)
[name for name in sys.modules if name.startswith(("jupyter_distrib.kernel", "jupyter_distrib.pools"))]
"""


@pytest.mark.slow
def test_a_rank_that_calls_everything_loads_nothing_of_the_kernels_side(notebook: Notebook) -> None:
    notebook.ok("import torch")
    assert notebook.ok(CELL).result == "ranks 0-1: []"
