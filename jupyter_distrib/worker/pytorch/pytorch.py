"""The framework PyTorch of a rank, and the rank's GPU. Runs in the forkserver (`load`) and in the rank's main thread.

No function of `Device` waits without a limit: work on a GPU that never ends is left to a thread of its own.
"""

from __future__ import annotations

import gc
import importlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
import torch.distributed

from jupyter_distrib.interfaces import identity
from jupyter_distrib.interfaces.framework import TORCH, DeviceState
from jupyter_distrib.libraries.setting import when_imported
from jupyter_distrib.system.private_torch import COMPILER
from jupyter_distrib.wire import messages as m
from jupyter_distrib.worker.pytorch import (
    host_lookup,
    phase_clock,
    private,
    process_group,
    randomness,
    replaced_functions,
    tensor_memory,
)
from jupyter_distrib.worker.pytorch.group_sightings import GroupSightings

if TYPE_CHECKING:
    from jupyter_distrib.worker.pytorch.profiler import CellProfiler


_PRELOADED = (
    "sympy",
    COMPILER,
    "torch.distributed.fsdp",
    "torch.nn.parallel.distributed",
    "torch.utils.data",
    "jupyter_distrib.worker.autoparallel.training.data_parallel",
    "jupyter_distrib.worker.autoparallel.training.sharded",
    "jupyter_distrib.worker.autoparallel.training.meshes",
)
"""Modules that torch imports with the first optimizer or wrapper, and that strategies import at the start of a cell."""


class PyTorch:
    """The framework PyTorch; see `jupyter_distrib.interfaces.framework.Framework`."""

    name = TORCH

    def load(self) -> None:
        """Install the replacements that all ranks share, so that each inherits them by the fork; torch is already
        imported."""
        replaced_functions.refuse_launching()
        replaced_functions.replace_save()
        replaced_functions.allow_same_interop_threads()
        phase_clock.install()
        host_lookup.finish()

    def preload(self) -> Iterator[None]:
        for name in _PRELOADED:
            if name not in sys.modules:
                importlib.import_module(name)
                yield
        private.remove_folder_of_remote_modules()

    def set_up(self, order: m.WorkerOrder) -> None:
        """Seed random numbers, and replace torch's entry points for groups."""
        randomness.begin()
        self.sightings = GroupSightings()
        self._device = Device("" if order.visible_devices is None else order.device)
        self.groups = process_group.Rendezvous(order.rank, order.world_size, self._device.make_current)
        process_group.install(self.groups)
        when_imported(COMPILER, "torch.compile", private.leave_out_of_compiler)

    def prepare(self) -> None:
        phase_clock.clock.begin()
        self._device.make_current_again()
        torch.set_grad_enabled(True)  # an interrupt may have come before a step switched gradients on again

    def finish(self, values: Iterable[object]) -> None:
        private.end_loaders(values)

    def device(self, name: str) -> torch.device:
        return torch.device(name)

    def use_device(self) -> None:
        self._device.make_current()

    def drain(self, limit_s: float) -> DeviceState:
        return self._device.drain(limit_s)

    def device_memory(self) -> tuple[int, int] | None:
        return self._device.memory()

    def measure_peak(self) -> None:
        self._device.measure_peak()

    def peak_bytes(self) -> int | None:
        return self._device.peak_bytes()

    def phase_times(self) -> m.PhaseTimes | None:
        return phase_clock.clock.times()

    def profiler(self, command: m.Execute, send: Callable[[m.Profiled], None]) -> CellProfiler:
        from jupyter_distrib.worker.pytorch import profiler  # few cells need it

        several = identity.several_nodes() and identity.everyone(command)
        offset_s = self.groups.clock_offset_s() if several else 0.0
        return profiler.of_cell(command, phase_clock.clock, offset_s, send)

    def is_of_device(self, error: BaseException) -> bool:
        return isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error)

    def tensor_bytes(self, value: object) -> int:
        return tensor_memory.size_bytes(value)

    def warm_device(self) -> None:
        self._device.warm()

    def release_memory(self) -> None:
        self._device.release_memory()

    def use_threads(self, count: int) -> None:
        if torch.get_num_threads() != count:
            torch.set_num_threads(count)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


RELEASE_BYTES = 1 << 30
"""Size in bytes from which cached memory is worth returning to the device."""


class Device:
    """The GPU of a rank, or none.

    Args:
        name: `cuda:0`, `xpu:0`; empty for a CPU rank.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._module = torch.get_device_module(name) if name else None

    def make_current(self) -> None:
        """Make the GPU the current device of this thread, whose queries would otherwise make a context on the first
        GPU."""
        if self._module is not None:
            self._module.set_device(torch.device(self._name))

    def make_current_again(self) -> None:
        """Make the GPU and its default stream the current ones, if an earlier cell has chosen others."""
        if self._module is None:
            return
        if self._module.current_device() != torch.device(self._name).index:
            self.make_current()
        if self._name.startswith("cuda") and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.set_stream(torch.cuda.default_stream())

    def drain(self, limit_s: float) -> DeviceState:
        """Wait at most `limit_s` for all work on the device."""
        if self._module is None:
            return DeviceState()
        errors: list[str] = []
        thread = threading.Thread(target=self._synchronize, args=[errors], name="jupyter_distrib-drain", daemon=True)
        thread.start()
        thread.join(limit_s)
        if not errors:
            try:
                self._end_capture()
            except Exception as error:  # noqa: BLE001 - as in `_synchronize`, whose thread may still wait
                errors.append(_first_line(error))
        return DeviceState(drained=not (thread.is_alive() or errors), error=errors[0] if errors else "")

    def _end_capture(self) -> None:
        """Free random numbers of a CUDA graph whose capture has failed: torch (2.11) would refuse to draw any more. A
        copy of their state is in no capture."""
        index = torch.device(self._name).index
        for numbers in torch.cuda.default_generators[index : index + 1] if self._name.startswith("cuda") else ():
            numbers.graphsafe_set_state(numbers.clone_state())

    def _synchronize(self, errors: list[str]) -> None:
        try:
            self.make_current()
            assert self._module is not None
            self._module.synchronize()
        except Exception as error:  # noqa: BLE001 - after any error of the driver the context is unusable
            errors.append(_first_line(error))

    def memory(self) -> tuple[int, int] | None:
        """Return the bytes allocated for tensors and the bytes reserved by the allocator; None for a CPU rank."""
        return None if self._module is None else (self._module.memory_allocated(), self._module.memory_reserved())

    def measure_peak(self) -> None:
        """Begin to measure the most memory that tensors have at once."""
        if self._module is not None:
            gc.collect()  # otherwise memory of the last cell would be freed while this cell is measured
            self._module.reset_peak_memory_stats()

    def peak_bytes(self) -> int | None:
        """Return that peak; None for a CPU rank. It includes values that earlier cells have kept."""
        return None if self._module is None else self._module.max_memory_allocated()

    def warm(self) -> None:
        """Multiply two matrices to load the library for it (cuBLAS), without leaving memory allocated."""
        if self._module is None:
            return
        with suppress(Exception):  # out of memory, or a device that has failed: the cell will report it
            torch.mm(*[torch.ones(8, 8, device=self._name)] * 2)
            private.clear_workspaces()
            self._module.empty_cache()

    def release_memory(self) -> None:
        """Return the allocator's cached memory to the device, if it is large."""
        tensor_bytes, reserved_bytes = self.memory() or (0, 0)
        if self._module is not None and reserved_bytes - tensor_bytes > RELEASE_BYTES:
            self._module.empty_cache()
