"""The stand-in for `serverless_gpu.runtime`: the place of this process among the ranks. Kernel and ranks."""

from __future__ import annotations

from typing import Any

from jupyter_distrib.runtime import get_global_rank as _global_rank
from jupyter_distrib.runtime import (
    get_local_rank,
    get_local_world_size,
    get_node_rank,
    get_world_size,
)

__all__ = [
    "get_global_rank",
    "get_local_rank",
    "get_local_world_size",
    "get_node_rank",
    "get_replica_rank",
    "get_world_size",
]


def get_global_rank(group: Any = None) -> int:
    """Return the number of this rank among all ranks, or among the ranks of a process group."""
    if group is None:
        return _global_rank()
    from torch import distributed

    return distributed.get_rank(group)


def get_replica_rank() -> int:
    """Return the number of this rank's node: each node has one replica of the launched program."""
    return get_node_rank()
