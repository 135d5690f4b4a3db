"""The stand-in for `horovod.torch.elastic`: a training run continues from its last commit after a rank was lost.

Ranks are replaced by `--max-restarts`, which runs the cell again; ranks that were not lost are the same processes. So a
commit stays in the memory of each rank, and `run` copies the newest one to all ranks. If no remaining rank has one, as
after the loss of a node, the training starts over.

Rank's main thread.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.data import Dataset, Sampler

from jupyter_distrib.compat.horovod import context
from jupyter_distrib.compat.horovod.state import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from jupyter_distrib.interfaces import identity
from jupyter_distrib.worker.output import reporting

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]

_commits: dict[str, tuple[int, Any]] = {}
"""Last commit of this rank with its number, by run id; for one run at most."""


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that restores its state (the first argument) to the last commit, equal on all ranks, before it
    begins."""

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **keywords: Any) -> Any:
        context.init()
        state.resume()
        return func(state, *args, **keywords)

    return wrapper


class State:
    """The state from which a training run continues; subclasses define its contents."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[], Any]] = []
        self._commits = 0

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], Any]]) -> None:
        """Call functions when the ranks have changed, as after a restart."""
        self._callbacks += callbacks

    def commit(self) -> None:
        """Save the state, in case a rank is lost and for `restore`."""
        self.save()
        self._commits += 1
        if identity.cell.attempt < identity.cell.max_restarts:
            keep_commit(self._commits, self.saved())

    def check_host_updates(self) -> None:
        """Do nothing, since the cell is run again when ranks change."""

    def resume(self) -> None:
        """Adopt the newest commit of any rank, if there is one, and synchronize the state over all ranks."""
        mine = own_commit()
        numbers = allgather_object(-1 if mine is None else mine[0])
        newest = max(numbers)
        if mine is not None and mine[0] == newest:
            self.take(mine[1])
        self._commits = max(newest, 0)
        self.sync(numbers.index(newest))
        if identity.cell.attempt:
            self.reset()
            for call in self._callbacks:
                call()

    def save(self) -> None:
        """Copy the state into memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restore the last saved state."""
        raise NotImplementedError

    def saved(self) -> Any:
        """Return the last saved state."""
        raise NotImplementedError

    def take(self, saved: Any) -> None:
        """Adopt a state returned by `saved`, possibly of another object."""
        raise NotImplementedError

    def sync(self, root_rank: int = 0) -> None:
        """Adopt the state of one rank."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to changed ranks."""


def keep_commit(number: int, saved: Any) -> None:
    """Keep a commit in this process, in place of an earlier one."""
    run_id = reporting.run_id()
    if run_id is not None:
        _commits.clear()
        _commits[run_id] = number, saved


def own_commit() -> tuple[int, Any] | None:
    """Return the last commit of this rank in this run."""
    return _commits.get(reporting.run_id() or "")


class ObjectState(State):
    """A state of plain values, which are its attributes: `ObjectState(epoch=0, batch=0)`."""

    def __init__(self, **values: Any) -> None:
        super().__init__()
        self._names = tuple(values)
        for name, value in values.items():
            setattr(self, name, value)
        self._saved: Any = None
        self.save()

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    def save(self) -> None:
        self._saved = copy.deepcopy(self._values())

    def saved(self) -> Any:
        return self._saved

    def restore(self) -> None:
        self.take(self._saved)

    def take(self, saved: Any) -> None:
        self._saved = saved
        for name, value in copy.deepcopy(saved).items():
            setattr(self, name, value)

    def sync(self, root_rank: int = 0) -> None:
        for name, value in broadcast_object(self._values(), root_rank).items():
            setattr(self, name, value)
        self.save()


class TorchState(ObjectState):
    """A state with models, optimizers and samplers as well as plain values:
    `TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0)`."""

    def __init__(self, model: Any = None, optimizer: Any = None, **values: Any) -> None:
        given = {"model": model, "optimizer": optimizer} | values
        self._parts = {name: value for name, value in given.items() if _is_part(value)}
        for name, value in given.items():
            setattr(self, name, value)
        super().__init__(**{name: value for name, value in values.items() if name not in self._parts})

    def save(self) -> None:
        super().save()
        parts = {name: copy.deepcopy(part.state_dict()) for name, part in self._parts.items()}
        self._saved = {"values": self._saved, "parts": parts}

    def take(self, saved: Any) -> None:
        super().take(saved["values"])
        self._saved = saved
        for name, state in saved["parts"].items():
            self._parts[name].load_state_dict(copy.deepcopy(state))

    def sync(self, root_rank: int = 0) -> None:
        for part in self._parts.values():
            match part:
                case torch.nn.Module():
                    broadcast_parameters(part.state_dict(), root_rank)
                case Optimizer():
                    broadcast_optimizer_state(part, root_rank)
                case ElasticSampler():
                    part.sync()
        super().sync(root_rank)

    def reset(self) -> None:
        for part in self._parts.values():
            if isinstance(part, ElasticSampler):
                part.reset()


def _is_part(value: Any) -> bool:
    return isinstance(value, torch.nn.Module | Optimizer | ElasticSampler)


class ElasticSampler(Sampler[int]):
    """Samples this rank's share without what any rank has already processed in the epoch.

    Args:
        dataset: The dataset, with a length.
        shuffle: Whether each epoch has an order of its own.
        seed: The seed of the order, the same on all ranks.
    """

    def __init__(self, dataset: Dataset[Any], shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed, self.epoch = dataset, shuffle, seed, 0
        self.processed_indices: set[int] = set()
        self.num_replicas, self.rank = 0, 0
        self.indices: list[int] = []
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch, with nothing processed; called between two epochs."""
        self.epoch = epoch
        self.processed_indices = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that this rank has processed a batch of the current pass."""
        self.record_indices(self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size])

    def record_indices(self, indices: Sequence[int]) -> None:
        """Record that samples have been processed."""
        self.processed_indices.update(indices)

    def reset(self) -> None:
        """Divide the remaining samples among the ranks."""
        initialized = context.is_initialized()
        self.num_replicas, self.rank = (context.size(), context.rank()) if initialized else (1, 0)
        left = [index for index in range(len(self.dataset)) if index not in self.processed_indices]  # type: ignore[arg-type]
        if self.shuffle:
            order = torch.randperm(len(left), generator=torch.Generator().manual_seed(self.seed + self.epoch))
            left = [left[number] for number in order.tolist()]
        count = math.ceil(len(left) / self.num_replicas) * self.num_replicas
        padded = (left * math.ceil(count / max(1, len(left))))[:count]
        self.indices = padded[self.rank :: self.num_replicas]

    def sync(self) -> None:
        """Combine the processed samples of all ranks."""
        self.processed_indices = set().union(*allgather_object(self.processed_indices))
        self.reset()

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "processed_indices": set(self.processed_indices)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.epoch, self.processed_indices = state_dict["epoch"], set(state_dict["processed_indices"])
        self.reset()

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)
