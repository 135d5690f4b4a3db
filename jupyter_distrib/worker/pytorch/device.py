"""The rank's GPU: taken by each thread that queries it, drained after an unclean end, relieved of unused memory.
No function waits without a limit: work on a GPU that never ends is left to a thread of its own.
"""

from __future__ import annotations

import threading

import torch

from jupyter_distrib.worker.framework import DeviceState

RELEASE_BYTES = 1 << 30
"""The size from which memory that the allocator holds in reserve is worth giving back."""


class Device:
    """The GPU of a rank, or none.

    Args:
        name: `cuda:0`; empty for a CPU rank.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def take(self) -> None:
        """Make the GPU the current device of this thread, whose queries would otherwise make a context on the first
        GPU."""
        if self._name:
            torch.cuda.set_device(torch.device(self._name))

    def drain(self, limit_s: float) -> DeviceState:
        """Wait for all work of the device, for at most `limit_s`."""
        if not self._name:
            return DeviceState()
        errors: list[str] = []
        thread = threading.Thread(target=self._synchronize, args=[errors], name="jupyter_distrib-drain", daemon=True)
        thread.start()
        thread.join(limit_s)
        return DeviceState(drained=not (thread.is_alive() or errors), error=errors[0] if errors else "")

    def _synchronize(self, errors: list[str]) -> None:
        try:
            self.take()
            torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001 - after any error of the driver the context is unusable
            errors.append(str(error).partition("\n")[0] or type(error).__name__)

    def memory(self) -> tuple[int, int] | None:
        """Return the bytes of tensors, and those that the allocator holds for them; None for a CPU rank."""
        return (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) if self._name else None

    def release_memory(self) -> None:
        """Give back the memory that the allocator holds in reserve, if it is large."""
        if self._name and torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > RELEASE_BYTES:
            torch.cuda.empty_cache()
