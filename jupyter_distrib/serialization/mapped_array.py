"""Maps memory as a ctypes array that keeps the mapping alive. Any process, any thread; no state."""

from __future__ import annotations

import ctypes
import os
import weakref
from functools import cache
from typing import Any


def mapped_array(size_bytes: int, protection: int, flags: int, fd: int = -1, offset: int = 0) -> Any:
    """Return an array over new memory, whose mapping ends with it: views of it, and tensors over those, keep it alive.

    Args:
        size_bytes: The length in bytes; more than 0.
        protection: `PROT_READ` and the like; 0 for addresses that cannot be read.
        flags: `MAP_PRIVATE` and the like.
        fd: The file that is mapped, which may be closed afterwards; -1 for none.
        offset: The beginning of the mapped part of the file: a multiple of the page size.

    Raises:
        OSError: The system cannot map it.
    """
    libc = _libc()
    address = libc.mmap(None, size_bytes, protection, flags, fd, offset)
    if address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    array = (ctypes.c_ubyte * size_bytes).from_address(address)
    weakref.finalize(array, libc.munmap, address, size_bytes).atexit = False
    return array


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int64,  # off_t: 64 bit on every platform that torch supports
    ]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc
