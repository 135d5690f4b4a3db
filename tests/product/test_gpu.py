"""What needs a GPU. Skipped without one; one GPU is enough, except where two are named."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pynvml
import pytest
import torch

from tests.notebook import Notebook
from tests.processes import wait_until, wait_until_gone

GIB = 1 << 30


def _gpus() -> tuple[int, str]:
    """How many there are, by the driver, which makes no CUDA context here; and why there are none."""
    if not torch.backends.cuda.is_built():
        return 0, f"torch {torch.__version__} is not built for CUDA"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return 0, f"NVML: {error}"
    try:
        count = int(pynvml.nvmlDeviceGetCount())
    finally:
        pynvml.nvmlShutdown()
    return count, "" if count else "the driver tells no GPU"


COUNT, WHY_NOT = _gpus()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(COUNT == 0, reason=WHY_NOT)]
two_gpus = pytest.mark.skipif(COUNT < 2, reason=f"needs two GPUs, and here are {COUNT}")


@pytest.fixture
def first_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show kernels that start after it one GPU, so that notebooks have to share it."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0")


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Notebook]:
    """A second kernel."""
    folder = tmp_path / "other"
    folder.mkdir()
    with Notebook(folder) as book:
        assert book.cell("%load_ext jupyter_distrib").status == "ok"
        yield book


def used_bytes() -> int:
    """Used of all GPUs together. Unlike processes, containers are told that."""
    pynvml.nvmlInit()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(COUNT)]
        return sum(int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles)
    finally:
        pynvml.nvmlShutdown()


def pid_of(book: Notebook, options: str = "") -> int:
    outcome = book.cell(f"%%distributed --gpus 1 {options}\nimport os\nos.getpid()")
    assert outcome.status == "ok", outcome.text
    return int(outcome.result.partition(": ")[2])


def test_a_rank_has_its_gpu(notebook: Notebook) -> None:
    outcome = notebook.cell(
        dedent("""\
            %%distributed --gpus 1
            import torch
            (str(device), torch.ones(2, device=device).sum().item())""")
    )

    assert outcome.result == "rank 0: ('cuda:0', 2.0)"


def test_more_gpus_than_there_are_is_an_error_before_anything_starts(notebook: Notebook) -> None:
    outcome = notebook.cell("%%distributed --gpus 100\n1")

    assert outcome.ename == "PoolError"
    assert "--gpus 100" in outcome.evalue


def test_the_group_carries_tensors_of_both_kinds(notebook: Notebook) -> None:
    outcome = notebook.cell(
        dedent("""\
            %%distributed --gpus 1 --strategy ddp
            import torch, torch.distributed as dist
            a, b = torch.ones(1), torch.ones(1, device=device)
            dist.all_reduce(a); dist.all_reduce(b)
            (a.item(), b.item())""")
    )

    assert outcome.result == "rank 0: (1.0, 1.0)"


def test_gpu_tensors_come_back_on_the_cpu(notebook: Notebook) -> None:
    outcome = notebook.cell(
        dedent("""\
            %%distributed --gpus 1 --out r
            import torch
            torch.arange(3, device=device)""")
    )

    assert outcome.status == "ok"
    assert notebook.cell("str(r[0].device), r[0].tolist()").result == "('cpu', [0, 1, 2])"


TRAINING = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(32, 8).to(device)
losses = []
for _ in range(10):
    loss = {model}(x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
([round(each, 6) for each in losses], str(next(model.parameters()).device))
"""


def test_an_unchanged_loop_trains_on_the_gpu_as_it_does_on_one_device(notebook: Notebook) -> None:
    plain = notebook.cell(f"%%distributed --gpus 1\n{TRAINING.format(model='model.to(device)')}")
    trained = notebook.cell(f"%%distributed --gpus 1 --strategy ddp\n{TRAINING.format(model='model')}")

    assert plain.status == "ok", plain.text
    assert trained.result == plain.result
    assert "'cuda:0'" in trained.result


WAITING = "torch.cuda._sleep(10**8)\n    torch.cuda.synchronize()"
AHEAD = "a = a @ b"


@pytest.mark.parametrize("busy", [WAITING, AHEAD], ids=["the host waits for the GPU", "the host runs ahead"])
def test_an_interrupt_frees_a_rank_whose_gpu_computes_and_keeps_its_values(notebook: Notebook, busy: str) -> None:
    pid = pid_of(notebook)
    kept = notebook.cell(
        dedent("""\
            %%distributed --gpus 1 --keep w
            import torch
            w = torch.ones(3, device=device)""")
    )
    assert kept.status == "ok", kept.text
    notebook.start(
        "%%distributed --gpus 1\nimport torch\na = b = torch.eye(4096, device=device)\nprint('begun', flush=True)\n"
        f"while True:\n    {busy}"
    )
    notebook.until("begun")
    began_s = time.monotonic()
    notebook.interrupt()

    assert notebook.finish().ename == "KeyboardInterrupt"
    assert time.monotonic() - began_s < 2.0
    assert notebook.cell("%%distributed --gpus 1\nw.sum().item()").result == "rank 0: 3.0"
    assert pid_of(notebook) == pid


def test_a_rank_whose_context_is_dead_is_replaced_before_the_next_cell(notebook: Notebook) -> None:
    assert notebook.cell("%%distributed --gpus 1 --keep w\nw = 1").status == "ok"
    pid = pid_of(notebook)
    failed = notebook.cell(
        dedent("""\
            %%distributed --gpus 1
            import torch
            torch.zeros(3, device=device)[torch.tensor([7], device=device)].sum().item()""")
    )
    assert failed.status == "error"
    assert "device-side assert" in failed.text

    lost = notebook.cell("%%distributed --gpus 1\nw")
    assert lost.status == "error"
    assert "w" in lost.evalue
    works = notebook.cell(
        dedent("""\
            %%distributed --gpus 1
            import torch
            torch.ones(1, device=device).item()""")
    )
    assert works.result == "rank 0: 1.0", works.text
    assert pid_of(notebook) != pid


def test_a_rank_that_ran_out_of_memory_goes_on(notebook: Notebook) -> None:
    pid = pid_of(notebook)
    failed = notebook.cell(
        dedent("""\
            %%distributed --gpus 1
            import torch
            torch.empty(1 << 45, dtype=torch.uint8, device=device)""")
    )

    assert failed.ename == "OutOfMemoryError"
    works = notebook.cell(
        dedent("""\
            %%distributed --gpus 1
            import torch
            torch.ones(1 << 20, device=device).sum().item()""")
    )
    assert works.result == "rank 0: 1048576.0"
    assert pid_of(notebook) == pid


def test_an_idle_notebook_makes_room_and_one_that_keeps_something_does_not(
    first_gpu: None, notebook: Notebook, other: Notebook
) -> None:
    pid = pid_of(notebook)
    assert pid_of(notebook, "--fresh") != pid
    assert pid_of(other)
    kept = notebook.cell(
        dedent("""\
            %%distributed --gpus 1 --keep w
            import torch
            w = torch.ones(3, device=device)""")
    )
    assert kept.status == "ok", kept.text

    refused = other.cell("%%distributed --gpus 1\n1")
    assert refused.ename == "PoolError"
    assert "keeps w" in refused.evalue
    assert notebook.cell("%%distributed --gpus 1\nw.sum().item()").result == "rank 0: 3.0"


def test_a_lease_changes_hands_when_its_kernel_is_killed(first_gpu: None, notebook: Notebook, other: Notebook) -> None:
    held = notebook.cell(
        dedent("""\
            %%distributed --gpus 1 --keep big
            import torch
            big = torch.ones(1 << 28, device=device)""")
    )
    assert held.status == "ok", held.text
    pid = pid_of(notebook)
    os.kill(notebook.pid, signal.SIGKILL)

    got = other.cell(
        dedent("""\
            %%distributed --gpus 1 --wait 10
            import torch
            torch.ones(1 << 28, device=device).sum().item()""")
    )
    assert got.result == f"rank 0: {float(1 << 28)}", got.text
    assert wait_until_gone([pid], 2.0) == []


def test_gpu_memory_is_free_after_a_kernel_died(notebook: Notebook) -> None:
    before = used_bytes()
    cell = dedent("""\
        %%distributed --gpus 1 --keep big
        import os, torch
        big = torch.ones(1 << 29, device=device)
        os.getpid()""")
    text = notebook.cell(cell).result
    rank = int(text.partition(": ")[2])
    assert used_bytes() - before >= 2 * GIB

    notebook.restart()

    assert wait_until_gone([rank], 2.0) == []
    assert wait_until(lambda: used_bytes() - before < GIB // 4, 2.0), used_bytes() - before


@two_gpus
def test_two_gpus_train_together(notebook: Notebook) -> None:
    outcome = notebook.cell(f"%%distributed --gpus 2 --strategy ddp --out r\n{TRAINING.format(model='model')}")

    assert outcome.status == "ok", outcome.text
    assert notebook.cell("[device for _, device in r], r[0][0] == r[1][0]").result == "(['cuda:0', 'cuda:1'], True)"


@two_gpus
def test_after_stop_on_two_gpus_the_next_cell_trains(notebook: Notebook) -> None:
    endless = TRAINING.replace("range(10)", "iter(int, 1)").replace(
        "losses.append(loss.item())", "print('begun', flush=True)"
    )
    for _ in range(3):
        notebook.start(f"%%distributed --gpus 2 --strategy ddp\n{endless.format(model='model')}")
        notebook.until("begun")
        notebook.interrupt()
        assert notebook.finish().ename == "KeyboardInterrupt"
        trained = notebook.cell(f"%%distributed --gpus 2 --strategy ddp\n{TRAINING.format(model='model')}", 20.0)
        assert trained.status == "ok", trained.text
