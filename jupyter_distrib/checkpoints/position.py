"""The position of a data loader: its progress in the current pass over the data, and the random state of the pass.

`follow` makes a loader count the batches that it hands out, no matter which code iterates over it and which loader
reads for it (the share of a training strategy). `resume` calls it before the first pass, so that `save` finds the
position.

    state       samples that the pass has read so far; random numbers and sampler as they were at its beginning, and
                random numbers as they are now
    restored    the next pass begins as that one did, and leaves out samples that were read, without reading them again

A checkpoint has the random numbers of the rank that wrote it, which is rank 0. The random numbers of the other ranks
begin anew with each batch, by its number, so that they need not be saved.

Rank's main thread, or a plain program's.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler, Sampler

from jupyter_distrib.errors import DistributedError
from jupyter_distrib.system import private_torch
from jupyter_distrib.system.private_torch import ITERATOR_MAKER
from jupyter_distrib.worker.autoparallel.data.shard_samplers import (
    EpochSampler,
    SampleShare,
    ShardChoice,
    is_plain,
    seed_of_shares,
)
from jupyter_distrib.worker.pytorch import randomness

State = dict[str, Any]


@dataclass(slots=True, kw_only=True)
class _Pass:
    """One pass over the data."""

    begin: State
    batches: int = 0
    unit: int = 1
    """Number of samples in one batch over all ranks."""


class _Position:
    """The position of one loader."""

    def __init__(self, number: int) -> None:
        self._name, self._passes = f"loader {number}", 0
        """Name of this loader, the same on all ranks, and number of passes that have begun."""
        self._pass: _Pass | None = None
        self._reader: Callable[[], DataLoader[Any] | None] = lambda: None
        """The loader that actually reads: this one, or this rank's share of it."""
        self._saved: State | None = None
        """The position at which the next pass starts."""

    def state(self, loader: DataLoader[Any]) -> State:
        """Return the position as plain values and tensors."""
        if self._saved is not None:  # nothing has been read since the position was restored
            return self._saved | {"now": randomness.state()}
        if self._pass is None:
            begin, samples = _begin(loader, self._reader()), 0
        else:
            begin, samples = self._pass.begin, self._pass.batches * self._pass.unit
        now, reading = randomness.state(), self._pass is not None
        return {"reading": reading, "samples": samples, "passes": self._passes, "begin": begin, "now": now}

    def restore(self, state: State) -> None:
        self._saved, self._passes = state, state["passes"] - state["reading"]
        randomness.restore(state["now"], f"{self._name} restored")

    def read(self, loader: DataLoader[Any], original: Callable[[Any], Iterator[Any]]) -> Iterator[Any]:
        """Start a pass, at the restored position if there is one."""
        saved, self._saved = self._saved, None
        now = randomness.state()
        if saved is not None:
            _set_generators(loader, saved)
        self._passes += 1
        randomness.reseed(f"{self._name} pass {self._passes}")
        reader = self._reader()
        self._pass = current = _Pass(begin=_begin(loader, reader))
        if reader is not None and private_torch.has_iterator(reader):
            self._begin_again(reader, current, saved)
        with _reading(loader, lambda reader: self._prepare(loader, reader, current, saved)):
            batches = iter(original(loader))
        if saved is not None and saved["reading"]:
            self._leave_out(batches, current)
            randomness.restore(now, f"{self._name} restored")
        return self._counted(batches, current)

    def _begin_again(self, reader: DataLoader[Any], current: _Pass, saved: State | None) -> None:
        """Prepare a pass of a loader with persistent workers, which continues with its iterator."""
        if saved is not None:
            private_torch.drop_iterator(reader)
            return
        self._prepare(reader, reader, current, None)
        # A new iterator draws a seed for its workers before the sampler draws its own; so does the iterator that
        # continues from a checkpoint.
        torch.empty((), dtype=torch.int64).random_(generator=reader.generator)

    def _prepare(
        self, loader: DataLoader[Any], reader: DataLoader[Any], current: _Pass, saved: State | None
    ) -> tuple[int, Any]:
        """Return the number of batches for the reading loader to skip, and the sampler to read instead of its own."""
        self._reader = ref(reader)
        current.unit = (reader.batch_size or 1) * _replicas(reader)
        if saved is not None:
            current.batches = saved["samples"] // current.unit
            if saved["reading"] and (order := _order_of_others(loader, reader, saved["begin"]["sampler"])) is not None:
                current.begin = saved["begin"]
                return current.batches, order
            if saved["begin"]["sampler"] is not None and (sampler := _stateful(reader)) is not None:
                sampler.load_state_dict(saved["begin"]["sampler"])
        current.begin["sampler"] = _sampler_state(reader)
        return current.batches, None

    def _leave_out(self, batches: Iterator[Any], current: _Pass) -> None:
        """Skip a stream to the position; a loader with a sampler has already skipped."""
        reader = self._reader()
        if reader is not None and isinstance(reader.dataset, IterableDataset):
            for _ in range(current.batches):
                next(batches, None)

    def _counted(self, batches: Iterator[Any], current: _Pass) -> Iterator[Any]:
        try:
            while True:
                randomness.reseed(f"{self._name} pass {self._passes} batch {current.batches}")
                if (batch := next(batches, _END)) is _END:
                    return
                current.batches += 1
                yield batch
        finally:
            if self._pass is current:
                self._pass = None


_END = object()
_positions: WeakKeyDictionary[DataLoader[Any], _Position] = WeakKeyDictionary()


def follow(loader: DataLoader[Any]) -> None:
    """Count the batches of a loader from now on."""
    if loader not in _positions:
        _positions[loader] = _Position(len(_positions))
        cls: Any = type(loader)
        loader.__class__ = _following(cls)


def state_of(name: str, loader: DataLoader[Any]) -> State:
    """Return the position of a loader.

    Raises:
        DistributedError: Its batches have not been counted.
    """
    if loader not in _positions:
        raise DistributedError(
            f"`{name}` is a data loader whose batches have not been counted: call jupyter_distrib.resume(path, "
            f"{name}={name}, ...) before the loop that reads it; without a checkpoint it returns {{}}."
        )
    return _positions[loader].state(loader)


def restore(loader: DataLoader[Any], state: State) -> None:
    """Make the next pass of a loader continue from a position."""
    follow(loader)
    _positions[loader].restore(state)


@cache
def _following(cls: Any) -> Any:
    """Return a subclass with the same name, which pickles as the original class."""

    def __iter__(self: DataLoader[Any]) -> Iterator[Any]:  # noqa: N807
        position = _positions.get(self)
        return cls.__iter__(self) if position is None else position.read(self, cls.__iter__)

    def __reduce_ex__(self: DataLoader[Any], protocol: Any) -> Any:  # noqa: N807
        return object.__new__, (cls,), self.__dict__

    members = {"__iter__": __iter__, "__reduce_ex__": __reduce_ex__, "__module__": cls.__module__}
    return type(cls.__name__, (cls,), members)


# ------------------------------------------------------------------------------------------------ what reads


@contextmanager
def _reading(loader: DataLoader[Any], prepare: Callable[[DataLoader[Any]], tuple[int, Any]]) -> Iterator[None]:
    """Call `prepare` with the loader that creates the iterator, and make it skip as many batches as that returns, of
    the sampler that it returns."""
    # Called in `__iter__`, once for each pass; a class of loaders may have its own, which may call that of its base.
    originals: list[tuple[Any, Any]]
    originals = [(cls, vars(cls)[ITERATOR_MAKER]) for cls in type(loader).__mro__ if ITERATOR_MAKER in vars(cls)]
    begun: list[DataLoader[Any]] = []

    def replaced(original: Callable[[DataLoader[Any]], Any]) -> Callable[[DataLoader[Any]], Any]:
        @wraps(original)
        def make_iterator(reader: DataLoader[Any]) -> Any:
            if begun:
                return original(reader)
            begun.append(reader)
            return _made(reader, original, *prepare(reader))

        return make_iterator

    for cls, original in originals:
        setattr(cls, ITERATOR_MAKER, replaced(original))
    try:
        yield
    finally:
        for cls, original in originals:
            setattr(cls, ITERATOR_MAKER, original)


def _made(reader: DataLoader[Any], original: Callable[[DataLoader[Any]], Any], count: int, order: Any) -> Any:
    """Return the iterator of a loader, without its first batches; `order` is a sampler to read instead of its own."""
    name = "sampler" if reader.batch_sampler is None else "batch_sampler"
    inner = reader.__dict__[name]
    if order is not None and reader.batch_size is not None:
        order = BatchSampler(order, reader.batch_size, reader.drop_last)
    rest = _Rest(inner if order is None else order, 0 if isinstance(reader.dataset, IterableDataset) else count)
    reader.__dict__[name] = rest  # torch refuses an assignment
    try:
        batches = original(reader)
        rest.leave_out()
        return batches
    finally:
        reader.__dict__[name] = inner


class _Rest:
    """A sampler that skips its first elements the first time it is read."""

    def __init__(self, sampler: Any, count: int) -> None:
        self._sampler, self._count = sampler, count
        self._indices: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        if not self._count:
            return iter(self._sampler)
        self._indices = iter(self._sampler)
        return self

    def __next__(self) -> Any:
        self.leave_out()
        return next(self._indices)

    def leave_out(self) -> None:
        """Skip the first elements, but only after the loader has drawn its seed, since a sampler draws its own
        afterwards."""
        while self._count:
            self._count -= 1
            next(self._indices, None)

    def __len__(self) -> int:
        return len(self._sampler)


def _begin(loader: DataLoader[Any], reader: DataLoader[Any] | None) -> State:
    return {
        "random": randomness.state(),
        "generators": [_state_of_generator(each) for each in _generators(loader)],
        "sampler": None if reader is None else _sampler_state(reader),
    }


def _generators(loader: DataLoader[Any]) -> list[Any]:
    """Return the generators of torch, Python and numpy that a loader and its samplers hold, each once."""
    parts = [loader, loader.sampler, loader.batch_sampler]
    for part in parts:  # a sampler that draws from another one, as `BatchSampler` does, keeps it as `sampler`
        if (inner := getattr(part, "sampler", None)) is not None and not any(inner is each for each in parts):
            parts.append(inner)
    held = [each for part in parts for each in getattr(part, "__dict__", {}).values()]
    return [*{id(each): each for each in held if isinstance(each, _generator_types())}.values()]


def _generator_types() -> tuple[type, ...]:
    numpy = sys.modules.get("numpy")
    return torch.Generator, random.Random, *(() if numpy is None else (numpy.random.Generator,))


def _state_of_generator(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    return generator.getstate() if isinstance(generator, random.Random) else generator.bit_generator.state


def _set_generator(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.bit_generator.state = state


def _set_generators(loader: DataLoader[Any], saved: State) -> None:
    for generator, state in zip(_generators(loader), saved["begin"]["generators"], strict=False):
        _set_generator(generator, state)
    if saved["reading"]:
        randomness.restore(saved["begin"]["random"], "")  # the pass begins with random numbers of its own


def _replicas(reader: DataLoader[Any]) -> int:
    """Return the number of ranks that share a loader."""
    for part in (reader.sampler, reader.batch_sampler, reader.dataset):
        if isinstance(count := getattr(part, "num_replicas", None), int):
            return count
    return 1


def _order_of_others(loader: DataLoader[Any], reader: DataLoader[Any], saved: Any) -> Any:
    """Return the order in which to finish a pass of a shuffled loader that one rank began and several finish, or the
    other way round: a loader alone shuffles in another way than shares. None if that is no matter.

    Args:
        loader: The loader of the cell.
        reader: It, or this rank's share of it.
        saved: The state of the sampler with which the pass began.
    """
    if not is_plain(loader) or not isinstance(loader.sampler, RandomSampler):
        return None
    own = reader.sampler
    if saved is None and isinstance(own, EpochSampler):
        part = ShardChoice(rank=own.rank, size=own.num_replicas)
        return _ShareOfOne(loader.sampler, part, drop_last=reader.drop_last)
    if reader is loader and isinstance(saved, dict) and saved.keys() == {"epoch"}:
        alone: DistributedSampler[Any] = DistributedSampler(loader.dataset, 1, 0, seed=seed_of_shares(loader))
        alone.set_epoch(saved["epoch"])
        return alone
    return None


class _ShareOfOne(Sampler[Any]):
    """A share of the order that rank 0 draws like a rank alone: with its own random numbers, not those of all ranks."""

    def __init__(self, sampler: Any, part: ShardChoice, *, drop_last: bool) -> None:
        self._sampler, self._part, self._drop_last = sampler, part, drop_last

    def __iter__(self) -> Iterator[Any]:
        return iter(SampleShare([*self._sampler], self._part, drop_last=self._drop_last))


def _stateful(reader: DataLoader[Any]) -> Any:
    parts = (reader.sampler, reader.batch_sampler)
    return next((each for each in parts if callable(getattr(each, "load_state_dict", None))), None)


def _sampler_state(reader: DataLoader[Any]) -> Any:
    sampler = _stateful(reader)
    return None if sampler is None else sampler.state_dict()
