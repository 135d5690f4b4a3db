"""Tells which variables of the environment programs and libraries read once, when they load. Standard library only."""

from __future__ import annotations

import os
from collections.abc import Iterator

GPU_LOAD_TIME = (
    "CUBLAS_",
    "CUDA_",
    "CUDNN_",
    "NCCL_",
    "NVIDIA_",
    "NVTE_",
    "PYTORCH_",
    "TORCH_",
    "TRITON_",
)
"""Variables that CUDA, its libraries and torch read once in a process."""
SET_BY_LIBRARIES = ("CUDA_DEVICE_ORDER", "CUDA_MODULE_LOADING", "CUDA_VISIBLE_DEVICES", "TRITON_CACHE_DIR")
"""Variables among them that libraries set by themselves, or that other code handles."""
LOAD_TIME = (
    *GPU_LOAD_TIME,
    "LD_",
    "DYLD_",
    "PYTHON",
    "OMP_",
    "MKL_",
    "KMP_",
    "OPENBLAS_",
    "MALLOC_",
    "GLIBC_",
    "JUPYTER_DISTRIB_",
)
"""Variables that programs and libraries read when they load: kernels that differ in one get separate agents."""
NOT_LOAD_TIME = (
    "CUDA_VISIBLE_DEVICES",
    "PYTHONSTARTUP",
    "PYDEVD",
    "PYTHONBREAKPOINT",
    "PYTEST",
    "JUPYTER_DISTRIB_POOL",
    "JUPYTER_DISTRIB_STRATEGY",
    "JUPYTER_DISTRIB_CONFIG",
)


def changes(env: dict[str, str]) -> dict[str, str]:
    """Return the variables that a forked rank would read too late."""
    return {name: value for name, value in env.items() if _is_load_time(name) and os.environ.get(name) != value}


def _is_load_time(name: str) -> bool:
    return name.startswith(LOAD_TIME) and not name.startswith(NOT_LOAD_TIME)


def in_force() -> Iterator[str]:
    """Yield the variables of this process, each with its value."""
    return (f"{name}={value}" for name, value in os.environ.items() if _is_load_time(name))
