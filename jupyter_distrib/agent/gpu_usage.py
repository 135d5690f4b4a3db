"""The usage of each GPU of a worker group, read through NVML in a thread of its own.

A driver may take tens of milliseconds for an answer, or seconds for the first one, and the agent's loop does not wait:
it takes what the thread read last, and asks for the next reading. Never creates a CUDA context.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUsage:
    """The usage of one GPU at one moment."""

    by_pid: dict[int, int]
    """Bytes by process, as the driver tells; it tells none to a container that does not see the processes' pids."""
    used_bytes: int
    total_bytes: int
    percent: float | None
    """How busy the GPU is; None where the driver does not measure it."""

    def of(self, pid: int) -> int:
        """Return the bytes of one process, or of the whole GPU if the driver does not know it by this pid."""
        return self.by_pid.get(pid, self.used_bytes)


class GpuReader:
    """Reads some GPUs on demand, no faster than the driver answers."""

    def __init__(self, uuids: Sequence[str]) -> None:
        self._uuids = tuple(uuids)
        self._latest: dict[str, GpuUsage] = {}
        self._asked: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._busy = threading.Event()
        threading.Thread(target=self._serve, name="jupyter_distrib-gpus", daemon=True).start()

    def latest(self) -> dict[str, GpuUsage]:
        """Return the last reading by UUID, and ask for the next one."""
        if not self._busy.is_set():
            self._busy.set()
            self._asked.put(True)
        return self._latest

    def close(self) -> None:
        self._asked.put(False)

    def _serve(self) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception:  # noqa: BLE001 - no driver, or one that is broken: there is nothing to tell
            return
        try:
            while self._asked.get():
                self._latest = {uuid: usage for uuid in self._uuids if (usage := _read(pynvml, uuid)) is not None}
                self._busy.clear()
        finally:
            pynvml.nvmlShutdown()


def _read(nvml: Any, uuid: str) -> GpuUsage | None:
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError:
        return None
    return GpuUsage(
        by_pid=_by_pid(nvml, handle),
        used_bytes=int(memory.used),
        total_bytes=int(memory.total),
        percent=_percent(nvml, handle),
    )


def _by_pid(nvml: Any, handle: Any) -> dict[int, int]:
    try:
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:
        return {}
    return {int(each.pid): int(each.usedGpuMemory) for each in processes if each.usedGpuMemory is not None}


def _percent(nvml: Any, handle: Any) -> float | None:
    try:
        return float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    except nvml.NVMLError:
        return None
