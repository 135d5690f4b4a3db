"""What goes wrong with GPUs around a cell is told, and the next cell runs."""

from __future__ import annotations

import re
from textwrap import dedent

import pytest

from tests.feigned_cuda import FeignedCuda, trainings
from tests.notebook import Notebook


def test_a_gpu_falls_off_the_bus_in_training(machine: FeignedCuda, book: Notebook) -> None:
    book.start(trainings.cell("--strategy ddp", "itertools.count()"))
    book.until("steps")
    machine.lose(1)
    try:
        failed = book.finish()
        assert failed.status == "error"
        assert re.search(r"[Rr]ank 1", failed.text), failed.text
        again = book.ok(trainings.cell("--strategy ddp --fresh") + "str(device)")
        assert "steps" in again.text
        assert "lost" in again.text
    finally:
        machine.lose(1, on=False)


def test_the_notebook_changes_its_visible_gpus(machine: FeignedCuda, book: Notebook) -> None:
    book.ok("import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '5,6'")
    try:
        book.ok(
            dedent("""\
                %%distributed --gpus 2
                import torch
                torch.ones(1, device=device)""")
        )
        assert [gpus for gpus in sorted(machine.contexts().values()) if gpus != [0]] == [[5], [6]]
        refused = book.fails("%%distributed --gpus 3\nrank")
        assert "--gpus 3" in refused.text
        assert "CUDA_VISIBLE_DEVICES" in refused.text
        book.ok("os.environ['CUDA_VISIBLE_DEVICES'] = '99'")
        assert "99" in book.fails("%%distributed --gpus 1\nrank").text
    finally:
        book.ok("del os.environ['CUDA_VISIBLE_DEVICES']")
    assert "rank 0: 0" in book.ok("%%distributed --gpus 1\nrank").text


def test_a_rank_keeps_its_gpu_if_its_cell_names_others(book: Notebook) -> None:
    """CUDA reads the variable once, before the cell; the next cell finds it as it was."""
    found = book.ok(
        dedent("""\
            %%distributed --gpus 2
            import os, torch
            first = torch.ones(1, device=device)
            os.environ['CUDA_VISIBLE_DEVICES'] = '1'
            str(torch.ones(1, device=device).device), torch.cuda.device_count()""")
    )
    assert "rank 1: ('cuda:1', 2)" in found.text
    assert "choose GPUs in the notebook, with %env CUDA_VISIBLE_DEVICES=1" in found.text
    after = book.ok(
        dedent("""\
            %%distributed --gpus 2
            import os
            len(os.environ['CUDA_VISIBLE_DEVICES'].split(','))""")
    )
    assert "ranks 0-1: 2" in after.text
    assert "%env" not in after.text


def test_two_notebooks_on_one_gpu(machine: FeignedCuda) -> None:
    """Neither sees the other's GPU, and the second is told who has it."""
    with machine.notebook(CUDA_VISIBLE_DEVICES="7") as first, machine.notebook(CUDA_VISIBLE_DEVICES="7") as second:
        first.ok(
            dedent("""\
                %%distributed --gpus 1 --keep w
                import torch
                w = torch.ones(1, device=device)""")
        )
        refused = second.fails("%%distributed --gpus 1\nrank")
        assert "GPU 7" in refused.text
        assert "keeps w" in refused.text
        first.ok("%distributed_pool stop")
        assert "rank 0: 0" in second.ok("%%distributed --gpus 1\nrank").text


@pytest.mark.parametrize("ends", ["pass", "raise ValueError('mine')"])
def test_a_cell_begins_on_its_own_gpu_and_on_the_default_stream(book: Notebook, ends: str) -> None:
    """Else `.cuda()` would mean the GPU of another rank, if the last cell has left that as the current one."""
    head = "%%distributed --gpus 2\nimport torch\n"
    book.cell(f"{head}torch.cuda.set_stream(torch.cuda.Stream())\ntorch.cuda.set_device(1 - rank)\n{ends}")
    begun = book.ok(
        f"{head}torch.ones(1).cuda().device == device, torch.cuda.current_stream() == torch.cuda.default_stream()"
    )
    assert begun.result == "ranks 0-1: (True, True)"
