"""What a cell held of a GPU is free again, however the cell ends, and while the notebook idles."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from textwrap import dedent

import pytest

from tests.feigned_cuda import FeignedCuda, trainings
from tests.notebook import Notebook
from tests.processes import wait_until

BIG = "import torch\nbig = torch.empty(3 << 30, dtype=torch.uint8, device=device)\n"
SMALL_MB = 1024
"""A rank may keep a gigabyte for its next cell."""
BACK_S = 4.0


def is_back(machine: FeignedCuda) -> bool:
    return wait_until(lambda: all(machine.held_mb(gpu) < SMALL_MB for gpu in range(8)), BACK_S)


def test_after_an_exception(machine: FeignedCuda, book: Notebook) -> None:
    book.fails(f"%%distributed --gpus 2\n{BIG}raise ValueError")
    assert is_back(machine), [machine.held_mb(gpu) for gpu in range(8)]


def test_after_stop(machine: FeignedCuda, book: Notebook) -> None:
    book.start(f"%%distributed --gpus 2\n{BIG}print('holds', flush=True)\n__import__('signal').pause()")
    book.until("holds")
    assert machine.held_mb(0) >= 3000
    book.interrupt()
    book.finish()
    assert is_back(machine), [machine.held_mb(gpu) for gpu in range(8)]


def test_after_a_rank_was_killed(machine: FeignedCuda, book: Notebook) -> None:
    found = book.ok(
        dedent("""\
            %%distributed --gpus 2
            import os
            os.getpid()""")
    )
    pid = int(re.findall(r": (\d+)", found.text)[1])
    book.start(f"%%distributed --gpus 2\n{BIG}print('holds', flush=True)\n__import__('signal').pause()")
    book.until("holds")
    os.kill(pid, signal.SIGKILL)
    book.finish()
    assert is_back(machine), [machine.held_mb(gpu) for gpu in range(8)]


WHERE = {
    "forward": dedent("""\
        class Grows(torch.nn.Module):
            def forward(self, x):
                self.full = torch.empty(3 << 30, device=x.device)
                return x
        model.append(Grows())
    """),
    "backward": dedent("""\
        def grow(*_):
            torch.empty(3 << 30, device=device)
        model[0].register_full_backward_hook(grow)
    """),
    "optimizer": dedent("""\
        def grow(*_):
            torch.empty(3 << 30, device=device)
        optimizer.register_step_pre_hook(grow)
    """),
}


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_when_it_is_full(where: str, strategy: str, machine: FeignedCuda, book: Notebook) -> None:
    """All ranks run out of memory at the same place, as they mostly do; the next cell trains."""
    failed = book.fails(trainings.cell(f"--strategy {strategy}", model=trainings.MODEL + WHERE[where]))
    assert "OutOfMemoryError" in failed.text
    assert is_back(machine), [machine.held_mb(gpu) for gpu in range(8)]
    assert "steps" in book.ok(trainings.cell(f"--strategy {strategy}")).text


@pytest.mark.parametrize("steps", ["range(5)", "itertools.count()"])
def test_when_one_rank_is_full_with_a_kept_model(steps: str, machine: FeignedCuda, book: Notebook) -> None:
    """With five steps the other rank runs ahead, and ends its part."""
    book.ok(trainings.cell("--strategy ddp --keep model,optimizer"))
    grows = "if number == 3 and rank == 1: torch.empty(3 << 30, device=device)"
    again = "import itertools, torch\n"
    failed = book.fails(trainings.cell("--strategy ddp --keep model,optimizer", steps, grows, again))
    assert "OutOfMemoryError" in failed.text
    assert "Rank 1 raised it" in failed.text
    assert is_back(machine), [machine.held_mb(gpu) for gpu in range(8)]
    assert "steps" in book.ok(trainings.cell("--strategy ddp --keep model,optimizer", model=again)).text


def test_where_the_driver_tells_nothing_a_full_gpu_is_still_called_so(machine: FeignedCuda, book: Notebook) -> None:
    book.ok("%%distributed --gpus 2\npass")
    machine.refuse(on=True)
    try:
        failed = book.fails(
            dedent("""\
                %%distributed --gpus 2
                import torch
                torch.empty(3 << 30, device=device)""")
        )
        assert "he GPU is out of memory" in failed.text
        assert "rank 0: 1" in book.ok("%%distributed --gpus 1 --fresh\n1").text
    finally:
        machine.refuse(on=False)


def test_a_second_notebook_has_the_gpus_of_a_dead_one(machine: FeignedCuda) -> None:
    with machine.notebook() as first:
        first.start(f"%%distributed --gpus 8\n{BIG}print('holds', flush=True)\n__import__('signal').pause()")
        first.until("holds")
        os.kill(first.pid, signal.SIGKILL)
        with machine.notebook() as second:
            assert "rank 0" in second.ok(f"%%distributed --gpus 1 --wait 20\n{BIG}rank").text


def test_a_gpu_is_not_given_on_before_the_rank_that_was_killed_has_gone(machine: FeignedCuda) -> None:
    """The system takes the memory of a process away before the process is gone, which takes a while if it was used."""
    used = dedent("""\
        import torch
        big = torch.zeros(5 << 30, dtype=torch.uint8, device=device)
        torch.cuda.synchronize()
    """)
    with machine.notebook(CUDA_VISIBLE_DEVICES="7") as first, machine.notebook(CUDA_VISIBLE_DEVICES="7") as second:
        first.start(f"%%distributed --gpus 1\n{used}print('holds', flush=True)\n__import__('signal').pause()")
        first.until("holds")
        second.start(f"%%distributed --gpus 1 --wait 30\n{used}rank")
        second.until("GPU 7")
        os.kill(first.pid, signal.SIGKILL)
        found = second.finish()
    assert found.status == "ok", found.text


def test_a_full_gpu_has_room_for_the_comparison_of_weights_at_the_end(book: Notebook) -> None:
    """A copy of the weights as doubles would take four times their memory."""
    cell = """%%distributed --gpus 2 --strategy ddp --keep model
import torch
model = torch.nn.Linear(16384, 32768, bias=False, dtype=torch.bfloat16, device=device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 16384, dtype=torch.bfloat16, device=device)).sum().backward()
optimizer.step()
optimizer.zero_grad()
torch.cuda.empty_cache()
fill = torch.empty(torch.cuda.mem_get_info()[0] - (256 << 20), dtype=torch.uint8, device=device)
torch.cuda.memory_stats()["num_ooms"]
"""
    assert "ranks 0-1: 0" in book.ok(cell).text
    again = dedent("""\
        %%distributed --gpus 2 --strategy ddp
        import torch
        model
        torch.cuda.memory_stats()['num_ooms']""")
    assert "ranks 0-1: 0" in book.ok(again).text


def test_torch_is_told_the_processes_on_a_gpu_in_the_form_that_it_reads() -> None:
    """The function of NVML without a version fills in 16 bytes for each, as its first form did."""
    asks = """import ctypes
nvml, gpu, count = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p(), ctypes.c_uint(4)
nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(gpu))
found = (ctypes.c_ulonglong * 16)(*[7] * 16)
nvml.nvmlDeviceGetComputeRunningProcesses(gpu, ctypes.byref(count), found)
print(sorted(each & 0xFFFFFFFF for each in found[: 2 * count.value : 2]), set(found[2 * count.value :]))
"""
    with FeignedCuda(gpus=1) as machine:
        here = sorted((os.getpid(), os.getppid()))
        for pid in here:
            held = bytearray(192)
            held[128] = 1
            (machine.folder / f"memory/{pid}").write_bytes(held)
        command = (sys.executable, "-c", asks)
        told = subprocess.run(
            command, env={**os.environ, **machine.environment}, capture_output=True, text=True, check=False
        )
    assert told.stdout == f"{here} {{7}}\n", told.stderr
