"""The rank's GPU: taken by each thread that queries it, warmed before the first cell, drained after an unclean end,
relieved of unused memory.
No function waits without a limit: work on a GPU that never ends is left to a thread of its own.
"""

from __future__ import annotations

import threading
from contextlib import suppress

import torch

from jupyter_distrib.interfaces.framework import DeviceState
from jupyter_distrib.worker.pytorch import private

RELEASE_BYTES = 1 << 30
"""The size from which memory that the allocator holds in reserve is worth giving back."""


class Device:
    """The GPU of a rank, or none.

    Args:
        name: `cuda:0`, `xpu:0`; empty for a CPU rank.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._module = torch.get_device_module(name) if name else None

    def take(self) -> None:
        """Make the GPU the current device of this thread, whose queries would otherwise make a context on the first
        GPU."""
        if self._module is not None:
            self._module.set_device(torch.device(self._name))

    def drain(self, limit_s: float) -> DeviceState:
        """Wait for all work of the device, for at most `limit_s`."""
        if self._module is None:
            return DeviceState()
        errors: list[str] = []
        thread = threading.Thread(target=self._synchronize, args=[errors], name="jupyter_distrib-drain", daemon=True)
        thread.start()
        thread.join(limit_s)
        return DeviceState(drained=not (thread.is_alive() or errors), error=errors[0] if errors else "")

    def _synchronize(self, errors: list[str]) -> None:
        try:
            self.take()
            assert self._module is not None
            self._module.synchronize()
        except Exception as error:  # noqa: BLE001 - after any error of the driver the context is unusable
            errors.append(str(error).partition("\n")[0] or type(error).__name__)

    def memory(self) -> tuple[int, int] | None:
        """Return the bytes of tensors, and those that the allocator holds for them; None for a CPU rank."""
        return None if self._module is None else (self._module.memory_allocated(), self._module.memory_reserved())

    def warm(self) -> None:
        """Multiply two matrices, so that the library for it (cuBLAS) is loaded, and leave no memory taken."""
        if self._module is None:
            return
        with suppress(Exception):  # without memory, or of a device that has failed: the cell will tell
            torch.mm(*[torch.ones(8, 8, device=self._name)] * 2)
            private.clear_workspaces()
            self._module.empty_cache()

    def release_memory(self) -> None:
        """Give back the memory that the allocator holds in reserve, if it is large."""
        tensor_bytes, reserved_bytes = self.memory() or (0, 0)
        if self._module is not None and reserved_bytes - tensor_bytes > RELEASE_BYTES:
            self._module.empty_cache()
