"""The functions that a cell calls on a rank: `prepare` and `total`. Outside a rank they return their arguments.

Loads neither torch nor the kernel's side.
"""

from __future__ import annotations

from typing import Any

from jupyter_distrib.errors import DistributedError
from jupyter_distrib.interfaces import identity


def prepare(*objects: Any) -> Any:
    """Return models, optimizers, schedulers and data loaders, ready for the strategy of this run; outside a run,
    unchanged.

    Under `--strategy ddp` a model is replicated in place (it stays the object it is), moved to the rank's device, and a
    loader is replaced by one over the rank's share of the dataset, shuffled anew in every epoch. Several objects are
    returned in the order given.

    Raises:
        DistributedError: The run has no strategy, or the object cannot be prepared; the error says what to do.
    """
    if not identity.is_rank():
        return objects[0] if len(objects) == 1 else objects
    if identity.cell.strategy is None:
        raise DistributedError("jupyter_distrib.prepare() works inside a %%distributed cell only.")
    return identity.cell.strategy.prepare(*objects)


def total(*values: Any) -> Any:
    """Return numbers or tensors of an evaluation, also in dicts and lists, summed over all ranks; a single value is
    returned as itself.

    Only with `--shard-eval` does each rank evaluate a share of the data; otherwise, and outside a run, every rank has
    evaluated all of it and the values are returned unchanged. So the same cell is right in all three cases:
    `correct, seen = jupyter_distrib.total(correct, seen)`.
    """
    summed = (
        identity.cell.strategy.total(*values) if identity.is_rank() and identity.cell.strategy is not None else values
    )
    return summed[0] if len(summed) == 1 else summed
