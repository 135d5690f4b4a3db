"""Lets torch compute with fake tensors of a GPU where there is none. Only in a process that is thrown away.

Autograd asks a device guard for the device of each tensor. A CUDA build has one that asks the driver; a CPU build
has none and aborts the process ("not linked with support for cuda devices"). This module gives torch's C++ registry
a guard that answers 0, which torch then replaces with its own guard that does nothing, and tells autograd that CUDA
is built and has no context. The places of these two functions among the virtual ones are read from the header that
comes with torch.
"""

# ruff: noqa: SLF001 - private names, listed in `system/private_names.py`
from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path
from typing import Any

import torch

_REGISTRY = "_" + "ZN3c104impl26device_guard_impl_registryE"
"""`c10::impl::device_guard_impl_registry`, a pointer for each type of device."""
_HOOKS = "_" + "ZN2at6detail12getCUDAHooksEv"
"""`at::detail::getCUDAHooks()`."""
_CUDA = 1
"""The number of CUDA among the types of devices."""
_HEADER = "include/ATen/detail/AcceleratorHooksInterface.h"
"""The base class of `CUDAHooksInterface`, whose virtual functions come first."""
_SLOTS = 64

_kept: list[Any] = []
"""Objects that C++ now points to."""


def problem() -> str:
    """Return why this torch cannot compute with fake tensors of a GPU; empty if it can."""
    if torch.version.hip:
        why = "dry runs do not support torch for ROCm"
    elif len(_places()) < 2 or not hasattr(torch._C, "_ensureCUDADeviceGuardSet"):
        why = f"dry runs for GPUs do not support the way in which torch {torch.__version__} is built"
    else:
        return ""
    return f"{why}: check the cell with --ranks, or install another version of torch."


def _places() -> list[int]:
    """Return the places of `isBuilt` and `hasPrimaryContext` in the table of virtual functions."""
    header = Path(torch.__file__).parent / _HEADER
    if not header.exists():
        return []
    names = re.findall(r"\bvirtual\s[^(~]*?(~?\w+)\(", header.read_text())
    if not names or not names[0].startswith("~"):
        return []
    after_destructor = 1  # a destructor takes two places
    return [after_destructor + names.index(name) for name in ("isBuilt", "hasPrimaryContext") if name in names]


def install() -> None:
    """Install the guard and the answers."""
    folder = os.path.join(os.path.dirname(torch.__file__), "lib")
    c10, cpu = (ctypes.CDLL(os.path.join(folder, name)) for name in ("libc10.so", "libtorch_cpu.so"))
    zero = ctypes.CFUNCTYPE(ctypes.c_longlong, ctypes.c_void_p)(lambda _: 0)
    one = ctypes.CFUNCTYPE(ctypes.c_longlong, ctypes.c_void_p)(lambda _: 1)
    table = (ctypes.c_void_p * _SLOTS)(*[ctypes.cast(zero, ctypes.c_void_p).value] * _SLOTS)
    guard = (ctypes.c_void_p * 1)(ctypes.addressof(table))
    (ctypes.c_void_p * 32).in_dll(c10, _REGISTRY)[_CUDA] = ctypes.addressof(guard)
    torch._C._ensureCUDADeviceGuardSet()  # finds no device, and installs torch's own guard
    get = getattr(cpu, _HOOKS)
    get.restype = ctypes.c_void_p
    hooks = ctypes.cast(get(), ctypes.POINTER(ctypes.c_void_p))
    first = 2  # the offset and the type come before the functions
    size = ctypes.sizeof(ctypes.c_void_p) * first
    before = (ctypes.c_void_p * (_SLOTS + first)).from_address((hooks[0] or 0) - size)
    after = (ctypes.c_void_p * (_SLOTS + first))(*before)
    is_built, has_primary_context = _places()
    after[first + is_built] = ctypes.cast(one, ctypes.c_void_p).value
    after[first + has_primary_context] = ctypes.cast(zero, ctypes.c_void_p).value
    hooks[0] = ctypes.addressof(after) + size
    _kept.extend([zero, one, table, guard, after])
