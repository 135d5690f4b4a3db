"""`--strategy ddp`: every rank holds the whole model and sees its share of the data; gradients are averaged.

Makes the default process group before the cell. `prepare` uses torch's in-place data parallelism
(`torch.distributed._composable.replicate`, the reducer of `DistributedDataParallel` without the wrapper), so that
`model` stays the object it is, an instance of the notebook's own class, and its `state_dict` has no `module.` prefix.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from jupyter_distrib.errors import DistributedError
from jupyter_distrib.worker import group, identity

_replicas: WeakSet[torch.nn.Module] = WeakSet()
"""Models that were prepared and are still alive, since the notebook keeps them on the ranks."""


def begin() -> None:
    """Have a group: `gloo` on CPU ranks, `cpu:gloo,cuda:nccl` on GPU ranks (object collectives then work on both)."""
    group.current.ensure("cpu:gloo,cuda:nccl" if identity.device().type == "cuda" else "gloo")
    for model in list(_replicas):
        _follow_group(model)


def prepare(*objects: Any) -> Any:
    """The same objects, ready for data-parallel training, in the order given; one object comes back as itself."""
    prepared = tuple(_prepare(item) for item in objects)
    return prepared[0] if len(prepared) == 1 else prepared


def _prepare(item: Any) -> Any:
    if isinstance(item, torch.nn.parallel.DistributedDataParallel):
        return item
    if isinstance(item, torch.nn.Module):
        return _replicated(item)
    if isinstance(item, DataLoader):
        return _sharded(item)
    if isinstance(item, torch.optim.Optimizer):
        return _moved(item)
    if hasattr(item, "step") or hasattr(item, "state_dict"):
        return item  # schedulers and scalers follow their optimizer
    raise DistributedError(
        f"jupyter_distrib.prepare() takes models, optimizers, schedulers and data loaders, not {type(item).__name__}."
    )


def _replicated(model: torch.nn.Module) -> torch.nn.Module:
    from torch.distributed._composable.replicate import replicate  # a second of imports in an early rank

    device = identity.device()
    model.to(device)  # in place: an optimizer built earlier keeps its parameters
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return model  # nothing to average
    if model not in _replicas:
        name = type(model).__name__
        replicate(model, **_devices())
        type(model).__name__ = name  # torch has put a class of its own, `DDP...`, above the user's
        _replicas.add(model)
    return model


def _devices() -> dict[str, Any]:
    device = identity.device()
    return {"device_ids": [device]} if device.type == "cuda" else {}


def _follow_group(model: torch.nn.Module) -> None:
    """A reducer whose group is gone (cut by an interrupt, for instance) is made anew, as torch (2.13) makes the first:
    at the next forward, with the weights of rank 0."""
    from torch.distributed._composable.replicate import replicate

    state: Any = replicate.state(model)
    made = getattr(state, "_ddp", None)
    if made is None or made.process_group is dist.group.WORLD:
        return
    del state._ddp, made  # noqa: SLF001
    gc.collect()  # the old reducer's hooks on the parameters end with it
    state.has_initialized = False
    state._param_list, state._param_names = torch.nn.ParameterList(), []  # noqa: SLF001
    state.record_init_args(model, set(), **_devices())


def _moved(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """State that was made before the model moved follows its parameter; `step` counters stay where torch keeps them."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and name != "step":
                state[name] = value.to(parameter.device)
    return optimizer


class EpochSampler(DistributedSampler[Any]):
    """Shuffles anew in every epoch without being told `set_epoch`."""

    def __iter__(self) -> Iterator[Any]:
        indices = super().__iter__()
        self.epoch += 1
        return indices


def _sharded(loader: DataLoader[Any]) -> DataLoader[Any]:
    """The same loader over this rank's share of the dataset; the batch size stays that of one rank."""
    if isinstance(loader.sampler, DistributedSampler):
        return loader
    _check_shardable(loader)
    shuffle = isinstance(loader.sampler, RandomSampler)
    sampler = EpochSampler(
        loader.dataset, identity.world_size(), identity.rank(), shuffle=shuffle, drop_last=loader.drop_last
    )
    return DataLoader(
        loader.dataset,
        batch_size=loader.batch_size,
        sampler=sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


def _check_shardable(loader: DataLoader[Any]) -> None:
    if isinstance(loader.dataset, IterableDataset):
        raise DistributedError(
            "jupyter_distrib.prepare() cannot divide a DataLoader over an IterableDataset: have its __iter__ yield "
            "every world_size-th item, starting at rank."
        )
    own = loader.sampler
    if loader.batch_size is None and loader.batch_sampler is not None:
        own = loader.batch_sampler
    if not isinstance(own, (RandomSampler, SequentialSampler)):
        raise DistributedError(
            f"jupyter_distrib.prepare() cannot divide a DataLoader with its own {type(own).__name__}: "
            "build it in the cell with a torch.utils.data.DistributedSampler and leave it out of prepare()."
        )
