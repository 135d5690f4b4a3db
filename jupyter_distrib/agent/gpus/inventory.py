"""Lists this node's GPUs, as the driver reports them. Read in the thread of `nvml.py`, used in the agent's loop.

What the driver does not report about a GPU is unknown, and a GPU that it has lost is left out: neither keeps a cell
from running.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jupyter_distrib.agent.gpus import other_makers
from jupyter_distrib.agent.gpus.devices import Gpu, GpuProcess, Inventory
from jupyter_distrib.agent.gpus.nvml import Driver, NoDriver, NvmlSession, session
from jupyter_distrib.agent.gpus.torch_build import torch_build
from jupyter_distrib.system.call_soon import CallSoon
from jupyter_distrib.system.event_loop import Loop, Timer

FRESH_S = 1.0
"""Maximum age in seconds of a list that the status may show."""
LIMIT_S = 15.0
"""Age in seconds of a question from which on nobody waits for its answer: waking eight GPUs takes ten."""

Answered = Callable[[Inventory], None]


class GpuInventory:
    """The node's GPUs, for the agent's loop.

    Args:
        session: The session with the driver, in its thread.
        calls: Brings answers into the loop.
    """

    def __init__(self, loop: Loop, calls: CallSoon, session: NvmlSession) -> None:
        self._loop, self._calls, self._session = loop, calls, session
        self.latest: Inventory | None = None
        """The latest list; None until the first one."""
        self._read_s = 0.0
        self._waiting: list[_Request] = []
        """Requests that the current reading will answer."""
        self._for_next: list[_Request] = []
        """Requests that need a reading started after they were made."""
        self._asked_s: float | None = None
        """When the current reading began; None if there is none."""

    def ask(self, answered: Answered, *, fresh_s: float = FRESH_S, limit_s: float = LIMIT_S) -> None:
        """Call back with the list: at once if it is recent enough, else after a new reading, or with the old list if
        the driver does not answer.

        The driver is not asked again while it owes an answer. So only the first requests wait for a driver that hangs,
        and its answer, should it come, is for later ones.

        Args:
            answered: Called once, in the loop.
            fresh_s: Maximum age of the list; 0 forces a new reading.
            limit_s: Age in seconds of the driver's current question from which on this request does not wait for it.
        """
        if self.latest is not None and time.monotonic() - self._read_s < fresh_s:
            return answered(self.latest)
        request = _Request(answered=answered, limit_s=limit_s)
        if self._asked_s is not None and not fresh_s:
            self._for_next.append(request)
        else:
            self._waiting.append(request)
            self._read()
        return self._give_up_in_time(request)

    def _read(self) -> None:
        if self._asked_s is None:
            self._asked_s = time.monotonic()
            self._session.ask(lambda driver: self._hand_over(read(driver)))

    def _hand_over(self, inventory: Inventory) -> None:
        """Pass a list from the session's thread to the loop."""
        self._calls.put(lambda: self._receive(inventory))

    def _receive(self, inventory: Inventory) -> None:
        self.latest, self._read_s, self._asked_s = inventory, time.monotonic(), None
        waiting, self._waiting, self._for_next = self._waiting, self._for_next, []
        if self._waiting:
            self._read()
        for request in waiting:
            if request.timer is not None:
                request.timer.cancel()
            request.answered(inventory)

    def _give_up_in_time(self, request: _Request) -> None:
        """Answer a request as soon as the current question is too old for it."""
        asked_s = time.monotonic() - self._asked_s if self._asked_s is not None else 0.0
        if asked_s < request.limit_s:
            request.timer = self._loop.later(request.limit_s - asked_s, lambda: self._give_up_in_time(request))
            return
        for requests in (self._waiting, self._for_next):
            if request in requests:
                requests.remove(request)
        request.answered(replace(self.latest or Inventory(), silent_s=asked_s))


@dataclass(slots=True, kw_only=True, eq=False)
class _Request:
    """A request that waits for the list."""

    answered: Answered
    limit_s: float
    timer: Timer | None = None


_owed: tuple[queue.SimpleQueue[Inventory], float] | None = None
"""The question of `read_now` that the driver has not answered yet: where its answer comes, and when it was asked."""


def read_now(limit_s: float = LIMIT_S) -> Inventory:
    """Ask the driver and wait for the answer, in processes without a loop; from one thread.

    Args:
        limit_s: Age in seconds of the driver's current question from which on its answer is not waited for.
    """
    global _owed
    if _owed is not None and not _owed[0].empty():
        _owed = None  # too late: it may be old
    if _owed is None:
        box: queue.SimpleQueue[Inventory] = queue.SimpleQueue()
        _owed = box, time.monotonic()
        session.ask(lambda driver: box.put(read(driver)))
        session.close()
    box, asked_s = _owed
    try:
        found = box.get(timeout=max(0.0, asked_s + limit_s - time.monotonic()))
    except queue.Empty:
        return Inventory(silent_s=time.monotonic() - asked_s)
    _owed = None
    return found


def read(driver: Driver) -> Inventory:
    """Ask the driver for all GPUs. Never raises."""
    if isinstance(driver, NoDriver):
        broken = f"the GPU driver does not work ({driver.text})"
        return Inventory(problem=broken) if driver.text else other_makers.inventory(torch_build())
    try:
        count = driver.nvmlDeviceGetCount()
    except Exception as error:  # noqa: BLE001 - whatever a driver's library says
        return Inventory(problem=f"the GPU driver does not list its GPUs ({error})")
    gpus: list[Gpu] = []
    left_out: list[tuple[str, str]] = []
    index = 0
    for number in range(count):
        try:
            gpus += _read_gpu(driver, driver.nvmlDeviceGetHandleByIndex(number), index)
        except Exception as error:  # noqa: BLE001 - as above; the other GPUs can still be used
            if getattr(error, "value", None) == driver.NVML_ERROR_NO_PERMISSION:
                continue  # a scheduler has given this GPU to another job, and CUDA does not count it
            left_out.append((str(index), str(error)))
        index += 1
    if not left_out and all(gpu.slice is None for gpu in gpus):
        # Libraries read numbers there; with slices, or if a GPU is missing, CUDA may count differently from the driver.
        gpus = [replace(gpu, cuda_word=str(gpu.index)) for gpu in gpus]
    version = _query(driver, "nvmlSystemGetCudaDriverVersion_v2") or _query(driver, "nvmlSystemGetCudaDriverVersion")
    return Inventory(gpus=tuple(gpus), left_out=tuple(left_out), cuda_driver=int(version or 0))


def _read_gpu(driver: Driver, handle: Any, index: int) -> Iterator[Gpu]:
    """Read one GPU, or its slices if MIG divides it."""
    mode = _query(driver, "nvmlDeviceGetComputeMode", handle)
    if mode == driver.NVML_COMPUTEMODE_PROHIBITED:
        raise PermissionError("its compute mode is PROHIBITED")
    if (_query(driver, "nvmlDeviceGetMigMode", handle) or [0])[0] != 1:
        whole = _device(driver, handle, index)
        yield replace(
            whole,
            address=address(driver, handle),
            exclusive=mode == driver.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS,
            display=bool(_query(driver, "nvmlDeviceGetDisplayActive", handle)),
        )
        return
    slices = list(_slices(driver, handle))
    if not slices:
        raise LookupError("it is in MIG mode and has no slices")
    for number, piece in enumerate(slices):
        yield replace(_device(driver, piece, index), slice=number, address=address(driver, handle))


def _slices(driver: Driver, handle: Any) -> Iterator[Any]:
    for number in range(_query(driver, "nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        if (piece := _query(driver, "nvmlDeviceGetMigDeviceHandleByIndex", handle, number)) is not None:
            yield piece


def _device(driver: Driver, handle: Any, index: int) -> Gpu:
    total, used, shared = memory(driver, handle)
    mps = _query(driver, "nvmlDeviceGetMPSComputeRunningProcesses", handle)
    return Gpu(
        index=index,
        uuid=_text(driver.nvmlDeviceGetUUID(handle)),
        name=_text(_query(driver, "nvmlDeviceGetName", handle) or "GPU"),
        memory_bytes=total,
        used_bytes=used,
        shares_memory=shared,
        processes=processes(driver, handle),
        mps=bool(mps),
    )


def memory(driver: Driver, handle: Any) -> tuple[int | None, int | None, bool]:
    """Return a GPU's memory and its used part, each None if unknown, and whether it is the system's memory."""
    try:
        memory_info = driver.nvmlDeviceGetMemoryInfo(handle)
        return int(memory_info.total), int(memory_info.used), False
    except Exception as error:  # noqa: BLE001 - as in `read`
        if getattr(error, "value", None) == driver.NVML_ERROR_NOT_SUPPORTED:  # as on a DGX Spark, and some Jetsons
            return *_system_memory(), True
        return None, None, False


def address(driver: Driver, handle: Any) -> str:
    """Return a GPU's address on the PCI bus as Linux writes it; empty if unknown."""
    pci_info = _query(driver, "nvmlDeviceGetPciInfo", handle)
    domain, _, rest = _text(pci_info.busId).lower().partition(":") if pci_info is not None else ("", "", "")
    return f"{domain[-4:]}:{rest}" if rest else ""


def processes(driver: Driver, handle: Any) -> tuple[GpuProcess, ...]:
    """Return the compute processes on a GPU that the driver reports."""
    found = _query(driver, "nvmlDeviceGetComputeRunningProcesses", handle) or ()
    return tuple(
        GpuProcess(pid=int(each.pid), used_bytes=None if each.usedGpuMemory is None else int(each.usedGpuMemory))
        for each in found
    )


def _query(driver: Driver, function: str, *args: Any) -> Any:
    """Return the result of a function in the driver's library; None if it fails or does not exist."""
    try:
        return getattr(driver, function)(*args)
    except Exception:  # noqa: BLE001 - as in `read`
        return None


def _system_memory() -> tuple[int | None, int | None]:
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        total, available = (1024 * int(lines[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
    except (OSError, ValueError, KeyError):
        return None, None
    return total, total - available


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


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
    """Reads the usage of some GPUs on demand, never with more than one request pending."""

    def __init__(self, gpus: Sequence[Gpu], driver_session: NvmlSession = session) -> None:
        self._gpus, self._session = tuple(gpus), driver_session
        self._latest: dict[str, GpuUsage] = {}
        self._busy = threading.Event()
        self._closed = False

    def latest(self) -> dict[str, GpuUsage]:
        """Return the latest reading by UUID, and request the next one."""
        if not self._busy.is_set() and not self._closed:
            self._busy.set()
            self._session.ask(self._read)
        return self._latest

    def close(self) -> None:
        self._closed = True

    def _read(self, driver: Driver) -> None:
        try:
            self._latest = {gpu.uuid: usage for gpu in self._gpus if (usage := read_usage(driver, gpu)) is not None}
        finally:
            self._busy.clear()


def read_usage(driver: Driver, gpu: Gpu) -> GpuUsage | None:
    """Read the usage of one GPU, given its state at the lease; None if the driver has lost it."""
    if isinstance(driver, NoDriver):
        return None
    try:
        handle = driver.nvmlDeviceGetHandleByUUID(gpu.uuid.encode())
    except driver.NVMLError:
        return None
    total, used, shared = memory(driver, handle)
    before = 0 if gpu.used_bytes is None else gpu.used_bytes
    found = processes(driver, handle)
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
