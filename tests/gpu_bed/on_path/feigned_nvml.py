"""A stand-in for `libnvidia-ml.so.1`, in Python. In every process of a test bed; see `tests/gpu_bed/__init__.py`.

The real `pynvml` is used: only the C library behind it is replaced, by an object with the same functions, which fill
the caller's structures. What they tell is in `bed.json` and read anew at each call.
"""

from __future__ import annotations

import ctypes
import json
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ["CUDA_GPU_BED"])
_MIG = 1000
"""Handles of slices begin here: 1000 * (GPU + 1) + slice; those of GPUs are their numbers + 1."""


def bed() -> dict[str, Any]:
    """Return the bed as it is now."""
    out: dict[str, Any] = json.loads((FOLDER / "bed.json").read_text())
    return out


def contexts() -> dict[int, dict[str, int]]:
    """Return the bytes that living processes hold: by pid, then by the UUID of the GPU or slice."""
    found = {}
    for path in (FOLDER / "contexts").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            if _alive(int(path.name)):
                found[int(path.name)] = json.loads(path.read_text())
            else:
                path.unlink()
    return found


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class Error(Exception):
    """An NVML error by its number."""


def _answers(function: Any) -> Any:
    """Make a C function of a method: it returns 0, or the number of the `Error` that was raised."""

    def call(self: Library, *args: Any) -> int:
        self.note(function.__name__)
        while bed()["hangs"]:
            time.sleep(0.02)
        try:
            function(self, *args)
        except Error as error:
            return int(error.args[0])
        return 0

    return call


class Library:
    """The functions of the library, by their names in C."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._refcount = 0

    def note(self, name: str) -> None:
        """Write down who has called, for tests that count; a line at a time."""
        with (FOLDER / "calls").open("a") as log:
            log.write(f"{os.getpid()} {threading.current_thread().name} {name}\n")

    # ------------------------------------------------------------------------------------------------ the library

    @_answers
    def nvmlInitWithFlags(self, flags: object) -> None:
        init = bed()["init"]
        time.sleep(init["seconds"])  # a driver without persistence mode wakes every GPU
        if init["error"]:
            self._fail(init["error"])
        self._refcount += 1

    @_answers
    def nvmlShutdown(self) -> None:
        self._refcount -= 1

    @_answers
    def nvmlSystemGetDriverVersion(self, buffer: Any, size: object) -> None:
        buffer.value = bed()["driver"].encode()

    @_answers
    def nvmlSystemGetCudaDriverVersion(self, version: Any) -> None:
        version._obj.value = bed()["cuda_driver"]

    nvmlSystemGetCudaDriverVersion_v2 = nvmlSystemGetCudaDriverVersion

    # ------------------------------------------------------------------------------------------------ handles

    @_answers
    def nvmlDeviceGetCount_v2(self, count: Any) -> None:
        self._initialized()
        count._obj.value = len(bed()["gpus"])

    @_answers
    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> None:
        self._initialized()
        gpus = bed()["gpus"]
        if not 0 <= index.value < len(gpus):
            self._fail("INVALID_ARGUMENT")
        self._check_lost(gpus[index.value])
        self._hand_out(handle, index.value + 1)

    @_answers
    def nvmlDeviceGetHandleByUUID(self, uuid: Any, handle: Any) -> None:
        self._initialized()
        for number, gpu in enumerate(bed()["gpus"]):
            if gpu["uuid"].encode() == uuid.value:
                self._check_lost(gpu)
                return self._hand_out(handle, number + 1)
            for position, piece in enumerate(gpu["mig"]):
                if piece["uuid"].encode() == uuid.value:
                    return self._hand_out(handle, _MIG * (number + 1) + position)
        return self._fail("NOT_FOUND")

    @_answers
    def nvmlDeviceGetMigMode(self, handle: Any, current: Any, pending: Any) -> None:
        gpu = self._at(handle)
        if gpu["mig_mode"] is None:
            self._fail("NOT_SUPPORTED")
        current._obj.value = pending._obj.value = int(gpu["mig_mode"])

    @_answers
    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any, count: Any) -> None:
        count._obj.value = 7 if self._at(handle)["mig_mode"] is not None else 0

    @_answers
    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: Any, piece: Any) -> None:
        if index.value >= len(self._at(handle)["mig"]):
            self._fail("NOT_FOUND")
        self._hand_out(piece, _MIG * self._number(handle) + index.value)

    # ------------------------------------------------------------------------------------------------ one device

    @_answers
    def nvmlDeviceGetUUID(self, handle: Any, buffer: Any, size: object) -> None:
        buffer.value = self._at(handle)["uuid"].encode()

    @_answers
    def nvmlDeviceGetPciInfo_v3(self, handle: Any, info: Any) -> None:
        if not self._at(handle)["address"]:
            self._fail("NOT_SUPPORTED")
        info._obj.busId = self._at(handle)["address"].encode()

    @_answers
    def nvmlDeviceGetName(self, handle: Any, buffer: Any, size: object) -> None:
        buffer.value = self._at(handle)["name"].encode()

    @_answers
    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> None:
        device = self._at(handle)
        if device["memory"] != "ok":
            self._fail(device["memory"])
        used = device["used_bytes"] + sum(size for _, size in self._processes(device))
        memory._obj.total, memory._obj.used = device["memory_bytes"], used
        memory._obj.free = max(0, device["memory_bytes"] - used)

    @_answers
    def nvmlDeviceGetUtilizationRates(self, handle: Any, rates: Any) -> None:
        device = self._at(handle)
        if device["percent"] is None:
            self._fail("NOT_SUPPORTED")
        rates._obj.gpu, rates._obj.memory = device["percent"], 0

    @_answers
    def nvmlDeviceGetComputeMode(self, handle: Any, mode: Any) -> None:
        mode._obj.value = self._at(handle)["compute_mode"]

    @_answers
    def nvmlDeviceGetDisplayActive(self, handle: Any, active: Any) -> None:
        active._obj.value = int(self._at(handle)["display"])

    @_answers
    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Any, count: Any, infos: Any) -> None:
        device = self._at(handle)
        self._list(self._processes(device) if bed()["pids"] else [], count, infos)

    @_answers
    def nvmlDeviceGetGraphicsRunningProcesses_v3(self, handle: Any, count: Any, infos: Any) -> None:
        self._list([], count, infos)

    @_answers
    def nvmlDeviceGetMPSComputeRunningProcesses_v3(self, handle: Any, count: Any, infos: Any) -> None:
        device = self._at(handle)
        self._list(self._processes(device) if device["mps"] else [], count, infos)

    def nvmlErrorString(self, number: int) -> bytes:
        return b"an error of the test bed"

    # ------------------------------------------------------------------------------------------------ helpers

    def _fail(self, error: str) -> None:
        raise Error(getattr(self._nvml, f"NVML_ERROR_{error}"))

    def _initialized(self) -> None:
        if self._refcount <= 0:
            self._fail("UNINITIALIZED")

    def _check_lost(self, gpu: dict[str, Any]) -> None:
        if gpu["lost"]:
            self._fail("GPU_IS_LOST")
        if not gpu["permitted"]:
            self._fail("NO_PERMISSION")

    @staticmethod
    def _hand_out(handle: Any, number: int) -> None:
        ctypes.cast(ctypes.pointer(handle._obj), ctypes.POINTER(ctypes.c_void_p))[0] = number

    @staticmethod
    def _number(handle: Any) -> int:
        return int(ctypes.cast(handle, ctypes.c_void_p).value or 0)

    def _at(self, handle: Any) -> dict[str, Any]:
        """Return the GPU or the slice behind a handle."""
        self._initialized()
        number = self._number(handle)
        gpus = bed()["gpus"]
        gpu: dict[str, Any] = gpus[(number // _MIG if number >= _MIG else number) - 1]
        self._check_lost(gpu)
        return gpu if number < _MIG else {**gpu, "mig_mode": None, **gpu["mig"][number % _MIG]}

    def _processes(self, device: dict[str, Any]) -> list[tuple[int, int]]:
        ours = [(pid, held[device["uuid"]]) for pid, held in contexts().items() if device["uuid"] in held]
        return [*ours, *((each["pid"], each["used_bytes"]) for each in device["processes"])]

    def _list(self, processes: list[tuple[int, int]], count: Any, infos: Any) -> None:
        room, count._obj.value = count._obj.value, len(processes)
        if infos is None or room < len(processes):
            if processes:
                self._fail("INSUFFICIENT_SIZE")
            return
        for info, (pid, used_bytes) in zip(infos, processes, strict=False):
            info.pid, info.usedGpuMemory = pid, used_bytes


def install(nvml: Any) -> None:
    """Put the stand-in behind the real `pynvml`, which has just been imported."""
    nvml.nvmlLib = Library(nvml)
