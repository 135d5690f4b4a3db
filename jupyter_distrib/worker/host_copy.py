"""Asynchronous copies of small tensors between a device and the host. In ranks; any thread may read a copy."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

_LOOK_UP_S = 0.001


class HostCopy:
    """A copy of a tensor's current contents, readable on the host once the device has made it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host, self._event = sent_to_host(tensor.detach())

    def is_there(self) -> bool:
        """Return whether the copy can be read without waiting."""
        if self._event is None:
            return True
        if threading.current_thread() is not threading.main_thread():
            # A query from a thread that has set no device would make a context on the first GPU.
            torch.get_device_module(self._event.device).set_device(self._event.device)
        return bool(self._event.query())

    def has_come(self, within_s: float) -> bool:
        """Wait at most this long for the copy, interruptibly, and return whether it has arrived."""
        until_s = time.monotonic() + within_s
        while not (arrived := self.is_there()) and time.monotonic() < until_s:
            time.sleep(_LOOK_UP_S)
        return arrived

    def read(self) -> torch.Tensor:
        """Wait for the device and return the contents."""
        if self._event is not None and not self.is_there():
            self._event.synchronize()
        return self._host


def sent_to_host(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Return host memory for the contents, and the device event after which it holds them; None if it already does."""
    if tensor.device.type == "cpu":
        return tensor.clone(), None
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    event = torch.Event(tensor.device)
    event.record()
    return host, event


def sent_to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of a host tensor on a device, without waiting for the transfer."""
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def is_capturing() -> bool:
    """Return whether a CUDA graph is being captured, when nothing may be read on the host."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]
