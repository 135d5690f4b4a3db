"""The machine that the kit runs on: its GPUs, driver, torch and CUDA. Asks NVML and a process of its own, so that this
one makes no CUDA context."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_kit import report

ROOT = Path(__file__).resolve().parents[2]
ASK_TORCH = """
import json, torch
cuda = torch.cuda.is_available()
print(json.dumps({
    "torch": torch.__version__, "cuda": torch.version.cuda or torch.version.hip or "",
    "count": torch.cuda.device_count(),
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else "",
    "cudnn": str(torch.backends.cudnn.version() or "") if cuda else "",
    "capability": ", ".join(sorted({".".join(map(str, torch.cuda.get_device_capability(i)))
                                    for i in range(torch.cuda.device_count())})),
    "why": "" if cuda else "torch " + torch.__version__ + " sees no CUDA device",
}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU that torch sees."""

    uuid: str
    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the kit has found."""

    gpus: tuple[Gpu, ...]
    about: dict[str, str]
    why_no_gpu: str


def look() -> Machine:
    """Look at this machine."""
    done = subprocess.run([sys.executable, "-c", ASK_TORCH], capture_output=True, text=True, check=False, timeout=120)
    try:
        torch: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        torch = {"torch": "", "cuda": "", "count": 0, "why": done.stderr.strip()[-500:] or "torch printed nothing"}
    gpus, driver, why = _listed() if torch["count"] else ((), "", torch["why"])
    seen = gpus[: torch["count"]]
    names = [gpu.name for gpu in seen]
    about = {
        "day": report.today(),
        "gpus": ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names)),
        "memory": ", ".join(f"{gpu.memory_bytes / 2**30:.0f} GiB" for gpu in seen),
        "driver": driver,
        **{name: torch.get(name, "") for name in ("torch", "cuda", "nccl", "cudnn", "capability")},
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "commit": commit(),
    }
    return Machine(gpus=seen, about=about, why_no_gpu="" if seen else why or torch.get("why", "no GPU"))


def commit() -> str:
    """Return the commit of this checkout; empty without git."""
    try:
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip()


def _listed() -> tuple[tuple[Gpu, ...], str, str]:
    """The GPUs of NVML, its driver; and why there are none."""
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
            return tuple(_gpu(pynvml, handle) for handle in handles), _text(pynvml.nvmlSystemGetDriverVersion()), ""
        finally:
            pynvml.nvmlShutdown()
    except Exception as error:
        return (), "", f"NVML: {error}"


def _gpu(nvml: Any, handle: Any) -> Gpu:
    try:
        memory_bytes = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    except nvml.NVMLError:  # GB10 does not tell
        memory_bytes = 0
    uuid, name = _text(nvml.nvmlDeviceGetUUID(handle)), _text(nvml.nvmlDeviceGetName(handle))
    return Gpu(uuid=uuid, name=name, memory_bytes=memory_bytes)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
