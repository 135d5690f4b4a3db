"""The number of ranks that a pool has room for at once. In a thread that starts a queued run."""

from __future__ import annotations

import os
from collections.abc import Mapping

from jupyter_distrib.kernel.session.pools.pool_manager import PoolManager
from jupyter_distrib.kernel.session.runs.run_queue import Capacity
from jupyter_distrib.kernel.settings.settings import Settings


def of(settings: Settings, pools: PoolManager, pool: str, options: Mapping[str, str]) -> Capacity:
    """Return the size that the settings give the pool, else what its nodes have, which are reached with these options.
    Raises `PoolError`."""
    size = settings.size_of(pool)
    if size.count and not size.gpus:
        return Capacity(gpus=0, cpus=size.count)
    answer = pools.connect(pool, options).ask()
    nodes = answer.nodes or ()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and len(nodes) < 2:
        gpus = len(list(filter(None, visible.split(","))))
    else:
        gpus = sum(node.gpus or 0 for node in nodes)
    cpus = int(sum(node.cpus or 0 for node in nodes)) or os.cpu_count() or 1
    return Capacity(gpus=size.count or gpus, cpus=size.count or cpus)
