"""The GPUs of this node and who holds them. Runs in the agent's loop; never creates a CUDA context.

A lease is a lock on a file, held as long as the agent lives, so that agents of different environments never hand out
the same GPU, and a killed agent gives its leases back.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as NVML sees it; two readings of one GPU are equal, whatever is used on it by then."""

    index: int = field(compare=False)
    """Number in NVML's order (PCI bus), which is the order of CUDA_VISIBLE_DEVICES under
    CUDA_DEVICE_ORDER=PCI_BUS_ID."""
    uuid: str
    name: str = field(compare=False)
    memory_bytes: int = field(compare=False)
    used_bytes: int = field(compare=False)


def gpus() -> list[Gpu]:
    """Return the node's NVIDIA GPUs; empty without a driver."""
    try:
        import pynvml  # only the agent asks, and a machine without a GPU need not have it
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return [_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()


def _gpu(nvml: object, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)  # type: ignore[attr-defined]
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)  # type: ignore[attr-defined]
    return Gpu(
        index=index,
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),  # type: ignore[attr-defined]
        name=_text(nvml.nvmlDeviceGetName(handle)),  # type: ignore[attr-defined]
        memory_bytes=int(memory.total),
        used_bytes=int(memory.used),
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def visible(found: list[Gpu], chosen: tuple[str, ...] | None) -> list[Gpu]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES lets through, each once: indices or UUIDs (also shortened); CUDA stops
    at the first unknown one."""
    if chosen is None:
        return found
    out: list[Gpu] = []
    for word in map(str.strip, chosen):
        gpu = next((g for g in found if word == str(g.index) or (len(word) > 3 and g.uuid.startswith(word))), None)
        if gpu is None:
            break
        if gpu not in out:
            out.append(gpu)
    return out


def of_type(found: list[Gpu], wanted: str) -> list[Gpu]:
    """Return the GPUs whose name has every word of `wanted`, in any case: `A10` is in `NVIDIA A10`, not in `NVIDIA
    A100-SXM4`."""
    return [gpu for gpu in found if set(_words(wanted)) <= set(_words(gpu.name))]


def types(found: list[Gpu]) -> str:
    """Return the kinds of GPU for a sentence: `2 NVIDIA A10, 1 NVIDIA L4`; empty without GPUs."""
    names = [gpu.name for gpu in found]
    return ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name.lower())


class Leases:
    """The GPUs that this agent's worker groups hold."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._held: dict[str, int] = {}

    def take(self, gpu: Gpu, holder: str) -> str:
        """Lease a GPU. Return an empty string, or its holder if it is taken."""
        if gpu.uuid in self._held:
            return self.holder(gpu)
        fd = os.open(self._path(gpu), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            return self.holder(gpu) or "another process"
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps({"holder": holder, "since": time.time()}).encode(), 0)
        self._held[gpu.uuid] = fd
        return ""

    def give_back(self, gpu: Gpu) -> None:
        fd = self._held.pop(gpu.uuid, None)
        if fd is not None:
            os.ftruncate(fd, 0)
            os.close(fd)

    def holder(self, gpu: Gpu) -> str:
        """Return who holds a GPU and since when, as far as its file tells; empty if nobody does."""
        if gpu.uuid not in self._held and not self._is_locked(gpu):
            return ""  # a killed agent leaves its name there
        try:
            held = json.loads(self._path(gpu).read_text())
            return f"{held['holder']} since {time.strftime('%H:%M', time.localtime(held['since']))}"
        except (OSError, ValueError, KeyError):
            return ""

    def _is_locked(self, gpu: Gpu) -> bool:
        try:
            fd = os.open(self._path(gpu), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        else:
            return False
        finally:
            os.close(fd)

    def _path(self, gpu: Gpu) -> Path:
        return self._directory / f"{gpu.uuid}.lease"
