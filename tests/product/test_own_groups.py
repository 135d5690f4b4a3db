"""Cells that make and destroy a process group of their own, as scripts do, over and over in the same ranks."""

from __future__ import annotations

import pytest

from tests.notebook import Notebook

pytestmark = pytest.mark.slow

TRAINS = """%%distributed --ranks 2
import torch, torch.distributed as dist

def main():
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
    dist.destroy_process_group()

main()
dist.is_initialized()"""


def test_training_in_a_group_of_the_cells_own_never_hangs(notebook: Notebook) -> None:
    """torch's reducer must not be what frees the group: it would wait for gloo's thread with Python's lock held."""
    for _ in range(30):
        assert notebook.cell(TRAINS, timeout_s=20).result == "ranks 0-1: False"
