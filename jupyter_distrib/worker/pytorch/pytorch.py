"""The framework PyTorch of a rank. Runs in the forkserver (`load`) and in the rank's main thread."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed

from jupyter_distrib.interfaces import identity
from jupyter_distrib.interfaces.framework import TORCH, DeviceState
from jupyter_distrib.system.private_torch import COMPILER
from jupyter_distrib.wire import messages as m
from jupyter_distrib.worker.pytorch import (
    data_loaders,
    phase_clock,
    private,
    process_group,
    randomness,
    spawn_guard,
    tensor_memory,
    torch_save,
)
from jupyter_distrib.worker.pytorch.device import Device
from jupyter_distrib.worker.pytorch.group_sightings import GroupSightings

if TYPE_CHECKING:
    from jupyter_distrib.worker.pytorch.profiler import CellProfiler


_PRELOADED = (
    COMPILER,
    "torch.distributed.fsdp",
    "torch.nn.parallel.distributed",
    "torch.utils.data",
    "jupyter_distrib.worker.autoparallel.training.data_parallel",
    "jupyter_distrib.worker.autoparallel.training.sharded",
    "jupyter_distrib.worker.autoparallel.training.meshes",
)
"""The modules that torch imports with the first optimizer or wrapper, and strategies at the beginning of a cell."""


class PyTorch:
    """The framework PyTorch; see `jupyter_distrib.interfaces.framework.Framework`."""

    name = TORCH

    def load(self) -> None:
        """Replace what all ranks replace alike, so that each has it by its fork; torch came with this module."""
        spawn_guard.install()
        torch_save.install()
        phase_clock.install()

    def preload(self) -> None:
        for name in _PRELOADED:
            importlib.import_module(name)
        private.remove_folder_of_remote_modules()

    def settle(self, order: m.WorkerOrder) -> None:
        """Seed random numbers, replace the entry points of groups, and take the device."""
        randomness.begin()
        self.sightings = GroupSightings()
        self._device = Device("" if order.visible_devices is None else order.device)
        self.groups = process_group.Rendezvous(order.rank, order.world_size, self._device.take)
        process_group.install(self.groups)
        self._device.take()

    def prepare(self) -> None:
        phase_clock.clock.begin()
        torch.set_grad_enabled(True)  # an interrupt may have come before a step switched it on again

    def finish(self, values: Iterable[object]) -> None:
        data_loaders.end_loaders(values)

    def device(self, name: str) -> torch.device:
        return torch.device(name)

    def take_device(self) -> None:
        self._device.take()

    def drain(self, limit_s: float) -> DeviceState:
        return self._device.drain(limit_s)

    def device_memory(self) -> tuple[int, int] | None:
        return self._device.memory()

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
