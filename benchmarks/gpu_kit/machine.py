"""The machine that the kit runs on: its GPUs, driver, torch and CUDA. Torch is asked in a process of its own, so that
this one makes no CUDA context."""

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
IMPORT_LIMIT_S = 240.0
"""Seconds for the first import of torch, from a disk that may be slow."""
ASK_TORCH = """
import json, torch
cuda = torch.cuda.is_available()
devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())] if cuda else []
print(json.dumps({
    "torch": torch.__version__, "cuda": torch.version.cuda or torch.version.hip or "",
    "gpus": [{"uuid": "GPU-" + str(each.uuid).removeprefix("GPU-"), "name": each.name,
              "memory_bytes": each.total_memory} for each in devices],
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else "",
    "cudnn": str(torch.backends.cudnn.version() or "") if cuda else "",
    "capability": ", ".join(sorted({f"{each.major}.{each.minor}" for each in devices})),
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
    torch = _torch()
    seen = tuple(Gpu(**gpu) for gpu in torch["gpus"])
    names = [gpu.name for gpu in seen]
    about = {
        "day": report.today(),
        "gpus": ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names)),
        "memory": ", ".join(f"{gpu.memory_bytes / 2**30:.0f} GiB" for gpu in seen),
        "driver": _driver(),
        **{name: torch.get(name, "") for name in ("torch", "cuda", "nccl", "cudnn", "capability")},
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "commit": commit(),
    }
    return Machine(gpus=seen, about=about, why_no_gpu="" if seen else torch["why"])


def _torch() -> dict[str, Any]:
    try:
        command = [sys.executable, "-c", ASK_TORCH]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=IMPORT_LIMIT_S)
        told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"gpus": [], "why": f"torch did not look at the GPUs within {IMPORT_LIMIT_S:.0f} s"}
    except (IndexError, ValueError):
        return {"gpus": [], "why": done.stderr.strip()[-500:] or "torch printed nothing"}
    return told


def commit() -> str:
    """Return the commit of this checkout; empty without git."""
    try:
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip()


def _driver() -> str:
    """Return the driver's version; empty where there is none."""
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            version = pynvml.nvmlSystemGetDriverVersion()
        finally:
            pynvml.nvmlShutdown()
    except Exception:
        return ""
    return version.decode() if isinstance(version, bytes) else version
