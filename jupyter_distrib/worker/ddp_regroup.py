"""Data-parallel models that a notebook keeps on the ranks outlive the process group they were made with: a failure or a
stop cuts it. When a new group is made, they go over to it. Rank's main thread.

Whoever made them: `DistributedDataParallel` is what a script, Accelerate, Fabric and our own `ddp` strategy have in
common.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from jupyter_distrib.serialization import payload


def follow() -> None:
    """Have every such model use the default group, if its own was destroyed.

    Ranks that ended early may have been one step apart. So the next forward begins with the weights of rank 0.
    """
    parallel: Any = sys.modules.get("torch.nn.parallel.distributed")
    if parallel is None or not payload.kept_values or not dist.is_initialized():
        return
    for item in gc.get_objects():
        if issubclass(type(item), parallel.DistributedDataParallel) and _is_orphan(item):
            item._update_process_group(dist.group.WORLD)  # noqa: SLF001 - torch has no public way
            _synchronise_at_next_forward(item)


def _is_orphan(model: Any) -> bool:
    """Its group is gone, and was one of all ranks: only that has a successor."""
    group = model.process_group
    return group not in distributed_c10d._world.pg_map and group.size() == dist.get_world_size()  # noqa: SLF001


def _synchronise_at_next_forward(model: Any) -> None:
    """There, since all ranks come by at the same point of their program; collectives here might meet in any order."""
    from torch.distributed.utils import _sync_module_states

    def synchronise(module: Any, _: object) -> None:
        hook.remove()
        _sync_module_states(
            module=module,
            process_group=model.process_group,
            broadcast_bucket_size=model.broadcast_bucket_size,
            src=0,
            params_and_buffers_to_ignore=model.parameters_to_ignore,
        )

    hook = model.module.register_forward_pre_hook(synchronise, prepend=True)
