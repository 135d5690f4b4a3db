"""What needs a GPU. Skipped without one; one GPU is enough."""

from __future__ import annotations

import subprocess

import pytest

from tests.notebook import Notebook
from tests.processes import wait_until_gone


def _gpu_count() -> int:
    """By the driver, in a process of its own: this one must not make a CUDA context."""
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return 0
    return len(listed.splitlines())


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(_gpu_count() == 0, reason="no NVIDIA GPU on this machine")]


def _memory_holders() -> set[int]:
    query = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    return {int(pid) for pid in subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()}


def test_a_rank_has_its_gpu(notebook: Notebook) -> None:
    outcome = notebook.cell(
        "%%distributed --gpus 1\nimport torch\n(str(device), torch.ones(2, device=device).sum().item())"
    )

    assert outcome.result == "rank 0: ('cuda:0', 2.0)"


def test_more_gpus_than_there_are_is_an_error_before_anything_starts(notebook: Notebook) -> None:
    outcome = notebook.cell("%%distributed --gpus 100\n1")

    assert outcome.ename == "PoolError"
    assert "--gpus 100" in outcome.evalue


def test_the_group_carries_tensors_of_both_kinds(notebook: Notebook) -> None:
    outcome = notebook.cell(
        "%%distributed --gpus 1 --strategy ddp\nimport torch, torch.distributed as dist\n"
        "a, b = torch.ones(1), torch.ones(1, device=device)\ndist.all_reduce(a); dist.all_reduce(b)\n(a.item(), b.item())"
    )

    assert outcome.result == "rank 0: (1.0, 1.0)"


def test_gpu_tensors_come_back_on_the_cpu(notebook: Notebook) -> None:
    outcome = notebook.cell("%%distributed --gpus 1 --out r\nimport torch\ntorch.arange(3, device=device)")

    assert outcome.status == "ok"
    assert notebook.cell("str(r[0].device), r[0].tolist()").result == "('cpu', [0, 1, 2])"


def test_an_interrupt_frees_a_rank_that_computes_and_keeps_its_values(notebook: Notebook) -> None:
    assert (
        notebook.cell("%%distributed --gpus 1 --keep w\nimport torch\nw = torch.ones(3, device=device)").status == "ok"
    )
    notebook.start(
        "%%distributed --gpus 1\nimport torch\nprint('begun', flush=True)\nwhile True: torch.cuda.synchronize()"
    )
    notebook.until("begun")
    notebook.interrupt()

    assert notebook.finish().ename == "KeyboardInterrupt"
    assert notebook.cell("%%distributed --gpus 1\nw.sum().item()").result == "rank 0: 3.0"


def test_gpu_memory_is_free_after_a_kernel_died(notebook: Notebook) -> None:
    text = notebook.cell(
        "%%distributed --gpus 1 --keep big\nimport os, torch\nbig = torch.ones(10**8, device=device)\nos.getpid()"
    ).result
    rank = int(text.partition(": ")[2])

    notebook.restart()

    assert wait_until_gone([rank], 2.0) == []
    assert rank not in _memory_holders()
