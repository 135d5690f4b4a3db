"""Moves kept data-parallel models to a new process group: they outlive the group that they were created with, which is
destroyed after a failure or a stop. Rank's main thread.

This works no matter what created the model: a script, Accelerate, Fabric and our own `ddp` strategy all use
`DistributedDataParallel`.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from jupyter_distrib.serialization import payload
from jupyter_distrib.worker.pytorch import private


def move_to_default_group() -> None:
    """Move every data-parallel model whose group was destroyed to the default group.

    Ranks that ended early may have been one step apart. So the next forward pass begins with the weights of rank 0.
    """
    for item in _models():
        if _is_orphan(item):
            before = item.process_group  # must not be freed by the reducer, see `DestroyedGroups`
            private.set_group_of(item, dist.group.WORLD)
            del before
            _synchronise_at_next_forward(item)


def restart_steps() -> None:
    """Make every data-parallel model that was stopped in the middle of a step start a new one, with the weights of rank
    0."""
    for item in _models():
        if private.is_known(item.process_group):
            private.set_group_of(item, item.process_group)
            _synchronise_at_next_forward(item)


def _models() -> Iterator[Any]:
    """Yield the kept data-parallel models."""
    parallel: Any = sys.modules.get("torch.nn.parallel.distributed")
    if parallel is None or not payload.kept_values or not dist.is_initialized():
        return
    yield from (item for item in gc.get_objects() if issubclass(type(item), parallel.DistributedDataParallel))


def _is_orphan(model: Any) -> bool:
    """Return whether a model's group was destroyed and had all ranks: only such a group has a successor."""
    group = model.process_group
    return not private.is_known(group) and group.size() == dist.get_world_size()


def _synchronise_at_next_forward(model: Any) -> None:
    """Synchronise a model at its next forward pass, which all ranks reach; collectives at this point might be matched
    in the wrong order."""

    def synchronise(*_: object) -> None:
        hook.remove()
        private.synchronise(model)

    hook = model.module.register_forward_pre_hook(synchronise, prepend=True)
