"""Reads the usage of each GPU of a worker group. Read in the thread of `nvml.py`: the agent's loop takes the last
reading, and asks for the next."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jupyter_distrib.agent.gpus import inventory
from jupyter_distrib.agent.gpus.devices import Gpu
from jupyter_distrib.agent.gpus.nvml import Driver, NoDriver, NvmlSession, session


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUsage:
    """The usage of one GPU at one moment."""

    by_pid: dict[int, int]
    """Bytes by process, as the driver reports them; it reports none to a container that does not see the processes'
    pids."""
    own_bytes: int | None
    """Memory used beyond what was used when the GPU was leased; None if unknown."""
    total_bytes: int | None
    percent: float | None
    """Utilization of the GPU in percent; None where the driver does not measure it."""

    def lists(self, pid: int) -> bool:
        """Return whether the driver reports this process."""
        return pid in self.by_pid

    def of(self, pid: int) -> int | None:
        """Return the bytes of one process; if the driver does not list its pid, the memory used since the lease."""
        return self.by_pid.get(pid, self.own_bytes)


class GpuReader:
    """Reads some GPUs on demand, no faster than the driver answers."""

    def __init__(self, gpus: Sequence[Gpu], driver_session: NvmlSession = session) -> None:
        self._gpus, self._session = tuple(gpus), driver_session
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
            self._latest = {gpu.uuid: usage for gpu in self._gpus if (usage := read(driver, gpu)) is not None}
        finally:
            self._busy.clear()


def read(driver: Driver, gpu: Gpu) -> GpuUsage | None:
    """Read the usage of one GPU, given its state at the lease; None if the driver has lost it."""
    if isinstance(driver, NoDriver):
        return None
    try:
        handle = driver.nvmlDeviceGetHandleByUUID(gpu.uuid.encode())
    except driver.NVMLError:
        return None
    total, used, shared = inventory.memory(driver, handle)
    before = 0 if gpu.used_bytes is None else gpu.used_bytes
    found = inventory.processes(driver, handle)
    return GpuUsage(
        by_pid={each.pid: each.used_bytes for each in found if each.used_bytes is not None},
        own_bytes=None if used is None or shared else max(0, used - before),
        total_bytes=total,
        percent=_percent(driver, handle),
    )


def _percent(driver: Driver, handle: Any) -> float | None:
    try:
        return float(driver.nvmlDeviceGetUtilizationRates(handle).gpu)
    except driver.NVMLError:
        return None
