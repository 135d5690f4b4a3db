"""What a cell says while it waits for devices, in a real kernel on a machine whose driver is played."""

from __future__ import annotations

import os
from pathlib import Path

from jupyter_distrib.agent.devices import Gpu, Leases
from tests.notebook import ROOT, Notebook

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


def test_a_cell_that_waits_for_a_gpu_says_at_once_who_has_it(runtime: Path, tmp_path: Path) -> None:
    (tmp_path / "pynvml.py").write_text(DRIVER)
    gpu = Gpu(index=0, uuid="GPU-played-0", name="NVIDIA H200", memory_bytes=1, used_bytes=0)
    with Notebook(tmp_path, {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}) as book:
        book.ok("%load_ext jupyter_distrib")
        leases = Leases(Path(os.environ["JUPYTER_DISTRIB_RUNTIME_DIR"]))
        assert leases.take(gpu, "other.ipynb (kernel 7)") == ""
        book.start("%%distributed --gpus 1 --wait 100\nrank", cell_id="c-1")
        told = book.until("Waiting: ").stdout  # the cell goes on
        book.manager.interrupt_kernel()
        outcome = book.finish()
        leases.give_back(gpu)

    assert "GPU 0: other.ipynb (kernel 7) since" in told
    assert outcome.ename == "KeyboardInterrupt"
