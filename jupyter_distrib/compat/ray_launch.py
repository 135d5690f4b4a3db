"""The stand-in for `serverless_gpu.ray`, which says what to use instead. Kernel side."""

from __future__ import annotations

from typing import Any, NoReturn

from jupyter_distrib.errors import DistributedError

__all__ = ["ray_launch"]


def ray_launch(**options: Any) -> NoReturn:
    """Raise `DistributedError`: a cluster of Ray inside ranks is not there yet."""
    raise DistributedError(
        "ray_launch has no stand-in yet: start Ray in the notebook with ray.init() and call the function there, or use "
        "the pool of kind ray, whose ranks Ray places."
    )
