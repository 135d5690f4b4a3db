"""The stand-in for `databricks.air`, made from its public documentation alone: our decorator under its names. Kernel
side."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from jupyter_distrib.compat.ray_launch import check_ray
from jupyter_distrib.compat.ray_launch import ray_launch as _ray_launch
from jupyter_distrib.compat.serverless_gpu import tracked
from jupyter_distrib.kernel.notebook.decorator import distributed as _distributed

__all__ = ["distributed", "ray_init", "ray_launch"]


def distributed(
    num_accelerators: int | Callable[..., Any] | None = None,
    accelerator_type: str | None = None,
    *,
    timeout: float | None = None,
    **options: Any,
) -> Any:
    """Give a function the method `distributed`, which runs it on this machine's accelerators and returns the value of
    each rank, by rank.

    Args:
        num_accelerators: The number of ranks; by default one for each accelerator of this machine. The function itself,
            where the decorator stands without parentheses.
        accelerator_type: The type, with the number on a node, as in `GPU_8xH100`; the number is ignored.
        timeout: Time limit for a call, in seconds.
        options: The other options of `jupyter_distrib.distributed`.
    """
    if callable(num_accelerators):
        return distributed()(num_accelerators)
    kind = None if accelerator_type is None else _kind_of(accelerator_type)
    decorate = _distributed(gpus=num_accelerators, gpu_type=kind, remote=False, timeout=timeout, **options)
    return tracked(decorate, {"gpus": "num_accelerators", "gpu_type": "accelerator_type"})


def ray_launch(
    num_accelerators: int | Callable[..., Any] | None = None,
    accelerator_type: str | None = None,
    *,
    timeout: float | None = None,
    **options: Any,
) -> Any:
    """Give a function the method `distributed`, which runs it on the head of a Ray cluster on these accelerators."""
    if callable(num_accelerators):
        return ray_launch()(num_accelerators)
    kind = None if accelerator_type is None else _kind_of(accelerator_type)
    return _ray_launch(num_accelerators, kind, timeout=timeout, **options)


def _kind_of(accelerator_type: str) -> str:
    """Return `H100` for `GPU_8xH100`. Raises `ValueError`."""
    match = re.fullmatch(r"(?:GPU_(\d+)x)?([A-Za-z0-9]+)", str(getattr(accelerator_type, "value", accelerator_type)))
    if match is None:
        raise ValueError(f"accelerator_type must be a string such as GPU_1xA10 or GPU_8xH100; got {accelerator_type!r}")
    return match[2]


def ray_init(*args: Any, **options: Any) -> Any:
    """Connect to Ray, as `ray.init`: in a function of `ray_launch` to its cluster, elsewhere to one on this machine,
    which is started if there is none. An existing connection stays.

    Raises:
        DistributedError: Ray is not installed.
    """
    check_ray("ray_init")
    import ray

    return ray.init(*args, **{"ignore_reinit_error": True, **options})
