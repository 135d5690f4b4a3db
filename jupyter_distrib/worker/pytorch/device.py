"""The rank's GPU: taken by each thread that asks it something, drained after an unclean end, given unused memory back.
Nothing here waits without a limit: work on a GPU that never ends is left to a thread of its own.
"""

from __future__ import annotations

import threading

import torch

from jupyter_distrib.worker.framework import DeviceState

RELEASE_BYTES = 1 << 30
"""Memory that the allocator holds in reserve and that is worth giving back."""


class Device:
    """The GPU of a rank, or none.

    Args:
        name: `cuda:0`; empty for a CPU rank.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def take(self) -> None:
        """Make it the current device of this thread, whose questions would make a context on the first GPU else."""
        if self._name:
            torch.cuda.set_device(torch.device(self._name))

    def drain(self, limit_s: float) -> DeviceState:
        """Wait for all work that was given to it."""
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
        except Exception as error:  # noqa: BLE001 - whatever the driver says, the context is of no more use
            errors.append(str(error).partition("\n")[0] or type(error).__name__)

    def release_memory(self) -> None:
        """Give others what the allocator holds in reserve, if it is much."""
        if self._name and torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > RELEASE_BYTES:
            torch.cuda.empty_cache()
