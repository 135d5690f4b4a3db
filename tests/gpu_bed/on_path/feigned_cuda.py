"""A stand-in for what ranks ask of `torch.cuda`, above a torch that was built for the CPU. In every process of a test
bed; see `tests/gpu_bed/__init__.py`.

`set_device` makes a context as CUDA does: it stays until the process ends, takes memory that `feigned_nvml` tells, and
may fail. There are no tensors on these GPUs.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

from feigned_nvml import FOLDER, bed, contexts

_current = 0
_initialized = False
_history: list[dict[str, Any]] | None = None
"""What `hold` has done, while it is recorded."""


def devices() -> list[dict[str, Any]]:
    """Return the GPUs and slices that this process sees, in its order, as CUDA goes by CUDA_VISIBLE_DEVICES."""
    found = [gpu for gpu in bed()["gpus"] if not gpu["lost"] and gpu["permitted"]]
    if os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        found.sort(key=lambda gpu: -gpu["speed"])
    words = os.environ.get("CUDA_VISIBLE_DEVICES")
    if words is None:
        slices = [piece for gpu in found for piece in gpu["mig"]]
        return slices[:1] or found  # a process sees one slice, and then no whole GPU
    out: list[dict[str, Any]] = []
    for word in words.split(","):
        device = _named(word.strip(), found)
        if device is None or device in out:
            break
        out.append(device)
    return out


def _named(word: str, found: list[dict[str, Any]]) -> dict[str, Any] | None:
    if word.isdigit():
        return found[int(word)] if int(word) < len(found) else None
    everything = [*found, *(piece for gpu in found for piece in gpu["mig"])]
    return next((each for each in everything if len(word) > 4 and each["uuid"].startswith(word)), None)


def device_count() -> int:
    return len(devices())


def set_device(device: Any) -> None:
    """Choose a GPU of those that are visible, and make a context there, once."""
    global _current, _initialized
    import torch

    number = device if isinstance(device, int) else (torch.device(device).index or 0)
    here, how = devices(), bed()["set_device"]
    if not here:
        raise RuntimeError("No CUDA GPUs are available")
    if number >= len(here):
        raise torch.AcceleratorError("CUDA error: invalid device ordinal")
    _note_group()
    time.sleep(how["seconds"])
    if how["error"]:
        raise torch.AcceleratorError(how["error"])
    chosen = here[number]
    holders = [pid for pid, held in contexts().items() if chosen["uuid"] in held and pid != os.getpid()]
    _note_strangers(chosen["uuid"], holders)
    if chosen.get("compute_mode") == 3 and holders:
        raise torch.AcceleratorError("CUDA error: CUDA-capable device(s) is/are busy or unavailable")
    _current, _initialized = number, True
    _write({**_held(), chosen["uuid"]: max(bed()["context_bytes"], _held().get(chosen["uuid"], 0))})


def hold(size_bytes: int) -> None:
    """Take so much more memory of the current GPU, as a tensor would; a negative number gives some back."""
    import torch

    uuid, held = devices()[_current]["uuid"], _held()
    if size_bytes > 0 and size_bytes > mem_get_info()[0]:
        raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size_bytes} bytes.")
    if _history is not None:
        _history.append({"action": "alloc" if size_bytes > 0 else "free_completed", "size": abs(size_bytes)})
    _write({**held, uuid: held.get(uuid, 0) + size_bytes})


def record_memory_history(enabled: str | None = "all", *, clear_history: bool = False, **_: object) -> None:
    global _history
    if enabled is None:
        _history = None
    elif _history is None or clear_history:
        _history = []


def snapshot() -> dict[str, Any]:
    return {"segments": [], "device_traces": [list(_history or ())]}


def mem_get_info(device: object = None) -> tuple[int, int]:
    here = devices()[_current]
    used = here["used_bytes"] + sum(held.get(here["uuid"], 0) for held in contexts().values())
    used += sum(each["used_bytes"] for each in here["processes"])
    return max(0, here["memory_bytes"] - used), here["memory_bytes"]


def memory_allocated(device: object = None) -> int:
    """Return what `hold` has taken, without the context."""
    return max(0, _held().get(devices()[_current]["uuid"], 0) - bed()["context_bytes"]) if _initialized else 0


def synchronize(device: object = None) -> None:
    """Wait for the GPU: fails, or takes for ever, where the bed says that the context is broken."""
    import torch

    how = bed()["synchronize"]
    time.sleep(how["seconds"])
    if how["error"]:
        raise torch.AcceleratorError(how["error"])


def _note_group() -> None:
    (FOLDER / "groups" / str(os.getpid())).write_text(_group())


def _note_strangers(uuid: str, holders: list[int]) -> None:
    """Write down if a rank of another worker group is on this GPU: it was given twice."""
    for pid in holders:
        theirs = FOLDER / "groups" / str(pid)
        if theirs.exists() and theirs.read_text() != _group():
            with (FOLDER / "violations").open("a") as log:
                log.write(f"{uuid}: {_group()} (process {os.getpid()}) beside {theirs.read_text()} (process {pid})\n")


def _group() -> str:
    identity = sys.modules.get("jupyter_distrib.interfaces.identity")
    return str(identity.order().group) if identity is not None else ""


def _path() -> Any:
    return FOLDER / "contexts" / str(os.getpid())


def _held() -> dict[str, int]:
    try:
        held: dict[str, int] = json.loads(_path().read_text())
    except OSError:
        return {}
    return held if _initialized else {}  # else left by an earlier process of this pid


def _write(held: dict[str, int]) -> None:
    fresh = FOLDER / "contexts" / f".{os.getpid()}-{threading.get_ident()}"
    fresh.write_text(json.dumps(held))
    fresh.rename(_path())


def version_file() -> bytes:
    """Return torch's `version.py`, as its build on this bed would have it."""
    cuda, hip = _build()
    return f"__version__ = '2.13.0'\ncuda: Optional[str] = {cuda!r}\nhip: Optional[str] = {hip!r}\n".encode()


def _build() -> tuple[str | None, str | None]:
    kind = bed()["torch"]
    return (None, "6.4") if kind == "rocm" else (None if kind == "cpu" else kind, None)


def install(torch: Any) -> None:
    """Put the stand-ins into torch, which has just been imported, unless the bed has a torch without CUDA."""
    if not any(_build()):
        return
    cuda = torch.cuda
    for function in (set_device, device_count, mem_get_info, memory_allocated, synchronize):
        setattr(cuda, function.__name__, function)
    cuda.memory_reserved = memory_allocated
    cuda.current_device = lambda: _current
    cuda.is_available = lambda: bool(devices())
    cuda.empty_cache = lambda: None
    cuda.memory._record_memory_history, cuda.memory._snapshot = record_memory_history, snapshot
    cuda.get_device_name = lambda device=None: devices()[_current]["name"]
    torch.backends.cuda.is_built = lambda: True
    torch.version.cuda, torch.version.hip = _build()
