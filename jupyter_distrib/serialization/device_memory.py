"""Pickle buffers whose bytes are still on a device: `unread` creates one without using host memory; `reader_of` returns
a function that copies it piece by piece, through pinned memory.

Any thread; torch is imported already where there is a storage.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable
from typing import Any

from jupyter_distrib.serialization.mapped_array import mapped_array

Read = Callable[[int, int], memoryview]
"""Called as `read(start, size)`; the returned bytes are valid until the next call."""

_PROT_NONE = 0
"""Protection of unreadable addresses: code that does not use `reader_of` crashes instead of reading garbage."""


def unread(storage: Any) -> Any:
    """Return an object with the buffer protocol that stands for a storage of a device, and keeps it alive.

    Raises:
        OSError: The address space is exhausted.
    """
    array = mapped_array(storage.nbytes(), _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    array.read = _reader(storage)
    return array


def reader_of(view: memoryview) -> Read | None:
    """Return the function that reads such a buffer; None if the view has its bytes itself."""
    return getattr(view.obj, "read", None) if isinstance(view.obj, ctypes.Array) else None


def _reader(storage: Any) -> Read:
    torch: Any = sys.modules["torch"]
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    host: Any = None

    def read(start: int, size_bytes: int) -> memoryview:
        nonlocal host
        if host is None or host.numel() < size_bytes:
            host = _on_host(torch, size_bytes)
        piece = host[:size_bytes]
        piece.copy_(whole[start : start + size_bytes])  # waits for the device
        return memoryview((ctypes.c_ubyte * size_bytes).from_address(piece.data_ptr())).cast("B")

    return read


def _on_host(torch: Any, size_bytes: int) -> Any:
    """Return host memory, pinned if possible, which makes copies several times as fast."""
    try:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:
        return torch.empty(size_bytes, dtype=torch.uint8)
