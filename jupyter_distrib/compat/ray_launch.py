"""The stand-in for `serverless_gpu.ray`: `ray_launch` starts a Ray cluster on the ranks' nodes, and runs a function on
its head. Kernel side; `on_ray.py` is what the ranks do."""

from __future__ import annotations

import functools
import importlib.util
import secrets
from collections.abc import Callable
from typing import Any

from jupyter_distrib.compat import on_ray
from jupyter_distrib.compat.ray_metrics import RayMetricsMonitor
from jupyter_distrib.compat.reserved_pools import remote_pool
from jupyter_distrib.errors import DistributedError
from jupyter_distrib.gpu_types import GPUType
from jupyter_distrib.kernel.notebook.decorator import distributed as _distributed

__all__ = ["RayFunction", "RayMetricsMonitor", "ray_launch"]


def ray_launch(
    gpus: int | Callable[..., Any] | None = None,
    gpu_type: GPUType | str | None = None,
    remote: bool = False,
    timeout: float | None = None,
    **options: Any,
) -> Any:
    """Give a function the method `distributed`, which runs it on the head of a Ray cluster of its own, with one member
    for each node of `gpus` ranks. `RAY_ADDRESS` is set there; Ray is shut down afterwards.

    Args:
        gpus: The number of ranks, whose GPUs, or CPUs, the cluster has; by default one for each GPU. The
            function itself, where the decorator stands without parentheses.
        gpu_type: The type of GPUs, such as `A10`.
        remote: True for the pool that the settings name as `reserved` or `remote`, as Databricks' variables choose at
            each call; False for this machine.
        timeout: Time limit for a call, in seconds.
        options: The other options of `jupyter_distrib.distributed`; with `pool`, `remote` is left out.
    """
    if callable(gpus):
        return ray_launch()(gpus)
    chosen: dict[str, Any] = {} if "pool" in options else {"remote": remote}
    return lambda function: RayFunction(
        function, {"gpus": gpus, "gpu_type": gpu_type, "timeout": timeout, **chosen, **options}
    )


class RayFunction:
    """A function that can also run on the head of a Ray cluster of its own."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        functools.update_wrapper(self, function)
        self.function, self._options = function, options

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function in this process."""
        return self.function(*args, **kwargs)

    def distributed(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function on the head of a new cluster and return its value.

        Raises:
            DistributedError: Ray is not installed; nothing was started.
            BaseException: The function's own exception, or `RuntimeError` if Ray did not start on some node.
        """
        check_ray("ray_launch")
        # Fresh ranks: a process that has loaded Ray keeps the token of its first cluster. A function that uses the
        # notebook's `ray` loads it with the arguments; Ray then determines how it authenticates, but needs the token
        # itself only later, when the rank has it.
        options = {"fresh": True, **self._options, "env": {"RAY_AUTH_MODE": "token", **self._options.get("env", {})}}
        if options.get("remote") is True:
            options |= {"remote": None, "pool": remote_pool()}
        launched = _distributed(**options)(on_ray.member)
        launched.subject, launched.called_with, launched.tracked_by = self.function, (args, kwargs), ("mlflow",)
        return launched.distributed(self.function, args, kwargs, secrets.token_hex(32))[0]


def check_ray(name: str) -> None:
    """Raise `DistributedError` if Ray is not installed."""
    if not importlib.util.find_spec("ray"):
        install = 'pip install "jupyter_distrib[ray]"'
        raise DistributedError(f"{name} needs Ray, which is not installed here: {install}.")
