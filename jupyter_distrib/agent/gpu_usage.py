"""The usage of each GPU of a worker group. Read in the thread of `nvml.py`: the agent's loop takes what was read last,
and asks for the next reading."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jupyter_distrib.agent import gpu_inventory
from jupyter_distrib.agent.nvml import Driver, NoDriver, NvmlSession, session


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUsage:
    """The usage of one GPU at one moment."""

    by_pid: dict[int, int]
    """Bytes by process, as the driver tells; it tells none to a container that does not see the processes' pids."""
    used_bytes: int | None
    total_bytes: int | None
    percent: float | None
    """How busy the GPU is; None where the driver does not measure it."""

    def of(self, pid: int) -> int | None:
        """Return the bytes of one process, or of the whole GPU if the driver does not know it by this pid."""
        return self.by_pid.get(pid, self.used_bytes)


class GpuReader:
    """Reads some GPUs on demand, no faster than the driver answers."""

    def __init__(self, uuids: Sequence[str], driver_session: NvmlSession = session) -> None:
        self._uuids, self._session = tuple(uuids), driver_session
        self._latest: dict[str, GpuUsage] = {}
        self._busy = threading.Event()
        self._closed = False

    def latest(self) -> dict[str, GpuUsage]:
        """Return the last reading by UUID, and ask for the next one."""
        if not self._busy.is_set() and not self._closed:
            self._busy.set()
            self._session.ask(self._read)
        return self._latest

    def close(self) -> None:
        self._closed = True

    def _read(self, driver: Driver) -> None:
        try:
            self._latest = {uuid: usage for uuid in self._uuids if (usage := read(driver, uuid)) is not None}
        finally:
            self._busy.clear()


def read(driver: Driver, uuid: str) -> GpuUsage | None:
    """Ask the driver for the usage of one GPU; None if it does not know it any more."""
    if isinstance(driver, NoDriver):
        return None
    try:
        handle = driver.nvmlDeviceGetHandleByUUID(uuid.encode())
    except driver.NVMLError:
        return None
    total, used, _ = gpu_inventory.memory(driver, handle)
    found = gpu_inventory.processes(driver, handle)
    return GpuUsage(
        by_pid={each.pid: each.used_bytes for each in found if each.used_bytes is not None},
        used_bytes=used,
        total_bytes=total,
        percent=_percent(driver, handle),
    )


def _percent(driver: Driver, handle: Any) -> float | None:
    try:
        return float(driver.nvmlDeviceGetUtilizationRates(handle).gpu)
    except driver.NVMLError:
        return None
