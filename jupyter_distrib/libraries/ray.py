"""The facts about Ray. References and datasets belong to the process that made them: Ray does not know the references
of another one, and waits for ever for the blocks of its datasets. An actor's handle works in a rank that is connected
to the cluster. Ray Train starts workers of its own, so only one rank may start it."""

from __future__ import annotations

import functools
import os
from typing import Any

from jupyter_distrib.errors import DistributedError
from jupyter_distrib.libraries.library import Library

_TRAINED = (
    "{name}.fit() on rank {rank} of a distributed cell: each rank would start a training of its own, on workers of its "
    "own. Call the training function directly, with --strategy ddp in place of ray.train.torch.prepare_model and "
    "prepare_data_loader; or call fit() in a cell without %%distributed, or on rank 0 alone."
)
_UNCONNECTED = (
    "the handle of an actor works only in a process that is connected to its Ray cluster: give the actor a name, "
    "`.options(name=...)`, and let the cell call `ray.init(address, namespace=...)` and `ray.get_actor(name)`, or call "
    "`ray.init` in a cell before"
)


def _actor(handle: Any) -> tuple[Any, ...]:
    make, arguments = handle.__reduce__()
    return actor_of, (make, arguments)


def actor_of(make: Any, arguments: tuple[Any, ...]) -> Any:
    """Return the handle of an actor, in a rank."""
    import ray

    if not ray.is_initialized():
        raise DistributedError(_UNCONNECTED)
    return make(*arguments)


def _mend_fit(name: str, module: Any) -> None:
    cls = getattr(module, name)
    fit = cls.fit

    @functools.wraps(fit)
    def from_first_rank(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if (rank := os.environ.get("RANK", "0")) != "0":
            raise DistributedError(_TRAINED.format(name=type(self).__name__, rank=rank))
        return fit(self, *arguments, **keywords)

    cls.fit = from_first_rank


_REFERENCE = "a reference is known only to the program that made it: take `ray.get(x)` in an earlier cell, and use that"
_DATASET = (
    "its blocks belong to the program that made it: take `x.to_pandas()` in an earlier cell, or write it to files and "
    "read them in the cell"
)
RAY = Library(
    modules=("ray",),
    sent={"ray.actor:ActorHandle": _actor},
    stays={
        "ray:ObjectRef": _REFERENCE,
        "ray:ObjectRefGenerator": _REFERENCE,
        "ray.util.client.common:ClientActorHandle": _UNCONNECTED,
        "ray.data:Dataset": _DATASET,
        "ray.data:DataIterator": _DATASET,
    },
    mend={
        "ray.train.base_trainer": functools.partial(_mend_fit, "BaseTrainer"),
        "ray.train.v2.api.data_parallel_trainer": functools.partial(_mend_fit, "DataParallelTrainer"),
        "ray.tune.tuner": functools.partial(_mend_fit, "Tuner"),
    },
)
