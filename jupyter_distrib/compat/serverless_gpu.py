"""The stand-in for `serverless_gpu`, its `launcher` and its `compute`: our decorator under its names. Kernel side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jupyter_distrib.compat.reserved_pools import remote_pool
from jupyter_distrib.gpu_types import GPUType
from jupyter_distrib.interfaces import identity
from jupyter_distrib.kernel.notebook.decorator import DistributedFunction
from jupyter_distrib.kernel.notebook.decorator import distributed as _distributed

__all__ = ["DistributedFunction", "GPUType", "distributed"]


def distributed(
    gpus: int | Callable[..., Any] | None = None,
    gpu_type: GPUType | str | None = None,
    remote: bool = False,
    timeout: float | None = None,
    **options: Any,
) -> Any:
    """Give a function the method `distributed`, which runs it on `gpus` ranks and returns the value of each, by rank.

    Args:
        gpus: The number of ranks; by default one for each GPU. The function itself, where the decorator stands without
            parentheses.
        gpu_type: The type of GPUs, such as `A10`.
        remote: True for the pool that the settings name as `reserved` or `remote`, as Databricks' variables choose at
            each call; False for this machine.
        timeout: Time limit for a call, in seconds.
        options: The other options of `jupyter_distrib.distributed`.
    """
    if callable(gpus):
        return distributed()(gpus)
    if remote is not True or options.get("pool") is not None or identity.is_rank():
        return tracked(_distributed(gpus=gpus, gpu_type=gpu_type, remote=remote, timeout=timeout, **options))
    return tracked(_distributed(gpus=gpus, gpu_type=gpu_type, timeout=timeout, **options), choose_pool=remote_pool)


def tracked(
    decorate: Callable[[Callable[..., Any]], DistributedFunction[..., Any]],
    names: Mapping[str, str] | None = None,
    *,
    choose_pool: Callable[[], str] | None = None,
) -> Callable[[Callable[..., Any]], DistributedFunction[..., Any]]:
    """Let MLflow, if it is installed, track each run of the functions that a decorator makes, and let a call return a
    list, as Databricks does.
    `names` are the decorator's names for options, for advice; `choose_pool` returns the pool of a call."""

    def made(function: Callable[..., Any]) -> DistributedFunction[..., Any]:
        distributed_function = decorate(function)
        distributed_function.tracked_by, distributed_function.gives_list = ("mlflow",), True
        distributed_function.names = dict(names or {})
        distributed_function.choose_pool = choose_pool
        return distributed_function

    return made
