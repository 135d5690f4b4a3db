"""Lets a build of torch without CUDA compute with fake tensors of a GPU. Only in a process that is thrown away.

Autograd asks a device guard for the device of each tensor. A CUDA build has one that does nothing where there is no
GPU; a CPU build has none and aborts the process ("not linked with support for cuda devices"). This module gives torch's
C++ registry a guard that answers 0, in whose place torch then puts its own guard without effect, and tells autograd
that CUDA is built. It depends on the layout of torch's C++ objects, so `KNOWN` names the versions that were tried.
"""

# ruff: noqa: SLF001 - private names, listed in `system/private_names.py`
from __future__ import annotations

import ctypes
import os
from typing import Any

import torch

KNOWN = ("2.12", "2.13")
"""The versions of torch whose CPU builds have the layout below."""
_REGISTRY = "_" + "ZN3c104impl26device_guard_impl_registryE"
"""`c10::impl::device_guard_impl_registry`, a pointer for each type of device."""
_HOOKS = "_" + "ZN2at6detail12getCUDAHooksEv"
"""`at::detail::getCUDAHooks()`."""
_CUDA = 1
"""The number of CUDA among the types of devices."""
_IS_BUILT, _HAS_PRIMARY_CONTEXT = 2, 4
"""Places in the table of the virtual functions of `CUDAHooksInterface`."""
_SLOTS = 64

_kept: list[Any] = []
"""Objects that C++ now points to."""


def problem() -> str:
    """Return why this torch cannot compute with fake tensors of a GPU; empty if it can."""
    if torch.version.cuda or torch.version.hip:
        return ""
    version = ".".join(torch.__version__.split(".")[:2])
    if version in KNOWN:
        return ""
    return (
        f"a dry run for GPUs needs a torch with CUDA, or the CPU build of torch {' or '.join(KNOWN)}; this is the CPU "
        f"build of {torch.__version__}: install one of those, or check the cell with --ranks"
    )


def install() -> None:
    """Install the guard, where torch has none."""
    if torch.version.cuda or torch.version.hip:
        return
    folder = os.path.join(os.path.dirname(torch.__file__), "lib")
    c10, cpu = (ctypes.CDLL(os.path.join(folder, name)) for name in ("libc10.so", "libtorch_cpu.so"))
    zero = ctypes.CFUNCTYPE(ctypes.c_longlong, ctypes.c_void_p)(lambda _: 0)
    one = ctypes.CFUNCTYPE(ctypes.c_longlong, ctypes.c_void_p)(lambda _: 1)
    table = (ctypes.c_void_p * _SLOTS)(*[ctypes.cast(zero, ctypes.c_void_p).value] * _SLOTS)
    guard = (ctypes.c_void_p * 1)(ctypes.addressof(table))
    (ctypes.c_void_p * 32).in_dll(c10, _REGISTRY)[_CUDA] = ctypes.addressof(guard)
    torch._C._ensureCUDADeviceGuardSet()  # finds no device, and installs torch's own
    get = getattr(cpu, _HOOKS)
    get.restype = ctypes.c_void_p
    hooks = ctypes.cast(get(), ctypes.POINTER(ctypes.c_void_p))
    first = 2  # before the functions lie the offset and the type
    size = ctypes.sizeof(ctypes.c_void_p) * first
    before = (ctypes.c_void_p * (_SLOTS + first)).from_address((hooks[0] or 0) - size)
    after = (ctypes.c_void_p * (_SLOTS + first))(*before)
    after[first + _IS_BUILT] = ctypes.cast(one, ctypes.c_void_p).value
    after[first + _HAS_PRIMARY_CONTEXT] = ctypes.cast(zero, ctypes.c_void_p).value
    hooks[0] = ctypes.addressof(after) + size
    _kept.extend([zero, one, table, guard, after])
