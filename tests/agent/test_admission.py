"""What a cell says while it waits for devices, in a real kernel on a machine whose driver is played."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_distrib.agent.devices import Gpu, Leases
from tests.notebook import ROOT, Notebook
from tests.processes import wait_until

DRIVER = '''
"""An NVML with one GPU."""
from types import SimpleNamespace
class NVMLError(Exception): ...
def __getattr__(name): return lambda *_: 0
def nvmlInit(): ...
def nvmlShutdown(): ...
def nvmlDeviceGetCount(): return 1
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetMemoryInfo(_): return SimpleNamespace(total=80 * 10**9, used=0, free=80 * 10**9)
def nvmlDeviceGetUUID(_): return "GPU-played-0"
def nvmlDeviceGetName(_): return "NVIDIA H200"
def nvmlDeviceGetComputeRunningProcesses(_): return []
'''

RANKS = """
import sys
if "jupyter_distrib.worker.forkserver" in sys.orig_argv:
    import torch
    torch.cuda.set_device = lambda device: None
"""
"""There is no CUDA for the ranks: they must not look for it."""


@pytest.fixture
def book(runtime: Path, tmp_path: Path) -> Iterator[Notebook]:
    (tmp_path / "pynvml.py").write_text(DRIVER)
    (tmp_path / "sitecustomize.py").write_text(RANKS)
    with Notebook(tmp_path, {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}) as one:
        one.ok("%load_ext jupyter_distrib")
        yield one


def test_fresh_ranks_get_the_gpus_of_those_that_leave(book: Notebook, tmp_path: Path) -> None:
    """Which may take their time: they have exit handlers."""
    cell = (
        "import atexit, os, pathlib, time\n"
        "def leave():\n    time.sleep(0.3)\n    pathlib.Path(f'left {os.getpid()}').touch()\n"
        "atexit.register(leave)\nos.getpid(), os.environ['CUDA_VISIBLE_DEVICES']"
    )
    pids = []
    for line in ("", "%distributed_pool restart", "%distributed_pool resize --gpus 1"):
        book.ok(line)
        for option in ("", " --fresh"):
            outcome = book.ok(f"%%distributed --gpus 1{option}\n{cell}")
            found = re.fullmatch(r"rank 0: \((\d+), 'GPU-played-0'\)", outcome.result)
            assert found, outcome.text
            assert "Waiting" not in outcome.text
            pids.append(found[1])
    assert len(set(pids)) == len(pids)
    assert {path.name for path in tmp_path.glob("left *")} == {f"left {pid}" for pid in pids[:-1]}


def test_fresh_ranks_get_the_gpus_of_those_that_were_exchanged_and_leave(book: Notebook, tmp_path: Path) -> None:
    """As the first ones of an agent are, as soon as it has better ones."""
    book.ok(
        "%%distributed --gpus 1\nimport atexit, pathlib, time\n"
        "def leave():\n    pathlib.Path('leaving').touch()\n    time.sleep(0.6)\n    pathlib.Path('left').touch()\n"
        "atexit.register(leave)"
    )
    assert wait_until((tmp_path / "leaving").exists, 30)
    assert book.ok("%%distributed --gpus 1 --fresh\nimport os\nos.path.exists('left')").result == "rank 0: True"


def test_a_cell_sees_the_gpus_that_the_notebook_wants_seen_now(book: Notebook) -> None:
    cell = "import os\nos.environ['CUDA_VISIBLE_DEVICES']"
    played = "rank 0: 'GPU-played-0'"
    assert book.ok(f"%%distributed\n{cell}").result == played
    book.ok("import os\nos.environ['CUDA_VISIBLE_DEVICES'] = ''")
    assert book.ok(f"%%distributed --gpus 1\n{cell}").result == "rank 0: ''"
    assert book.ok(f"%%distributed\n{cell}").result == "ranks 0-1: ''"
    book.ok("os.environ['CUDA_VISIBLE_DEVICES'] = '0'")
    assert book.ok(f"%%distributed --gpus 1\n{cell}").result == played
    pid = book.ok("%%distributed\nimport os\nos.getpid()").result
    assert book.ok("%%distributed\nimport os\nos.getpid()").result == pid
    book.ok("del os.environ['CUDA_VISIBLE_DEVICES']")
    assert book.ok(f"%%distributed\n{cell}").result == played


def test_a_gpu_that_another_cell_uses_is_still_refused(book: Notebook) -> None:
    book.ok("%%distributed --gpus 1 --detach --out run\nimport time\ntime.sleep(300)")
    refused = book.fails("%%distributed --gpus 1 --fresh\nrank")
    assert "only 0 of 1 GPUs are free" in refused.traceback
    book.ok("run.cancel()")


def test_a_cell_that_waits_for_a_gpu_says_at_once_who_has_it(book: Notebook) -> None:
    gpu = Gpu(index=0, uuid="GPU-played-0", name="NVIDIA H200", memory_bytes=1, used_bytes=0)
    leases = Leases(Path(os.environ["JUPYTER_DISTRIB_RUNTIME_DIR"]))
    assert leases.take(gpu, "other.ipynb (kernel 7)") == ""
    book.start("%%distributed --gpus 1 --wait 100\nrank", cell_id="c-1")
    told = book.until("Waiting: ").stdout  # the cell goes on
    book.manager.interrupt_kernel()
    outcome = book.finish()
    leases.give_back(gpu)

    assert "GPU 0: other.ipynb (kernel 7) since" in told
    assert outcome.ename == "KeyboardInterrupt"
