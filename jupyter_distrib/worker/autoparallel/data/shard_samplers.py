"""One rank's share of a data loader: the same loader with a sampler that takes every N-th.

Every rank gets equally many batches, so that none waits for another at the end of an epoch; missing samples are
taken from the beginning again, as `DistributedSampler` does. The shares of an evaluation are exact instead.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Iterator, MutableMapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)
from torch.utils.weak import WeakIdKeyDictionary

from jupyter_distrib.errors import DistributedError
from jupyter_distrib.interfaces import manual_parallelism
from jupyter_distrib.worker.autoparallel import object_collectives
from jupyter_distrib.worker.autoparallel.data.fingerprint import reads_ranks
from jupyter_distrib.worker.autoparallel.data.stream_shares import by_shards
from jupyter_distrib.worker.autoparallel.heuristics import Heuristics
from jupyter_distrib.worker.pytorch import randomness

_PIECE = 1 << 16
"""The number of elements of a sampler that the ranks exchange at once."""
_passes: MutableMapping[Any, int] = WeakIdKeyDictionary()
"""Number of shuffled passes over each data set, so that a loader that is recreated for every epoch shuffles differently
each time. By identity: a data set may be a tensor, whose `==` returns no bool, or have no hash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardChoice:
    """The share of a loader to read."""

    rank: int
    size: int
    """The number of ranks."""
    batch: Literal["per-rank", "global"] = "per-rank"
    """Whether the loader's batch size is that of one rank, or of all ranks together."""
    exact: bool = False
    """Whether no sample is read twice, so that ranks may get different numbers of samples."""
    together: bool = False
    """Whether the ranks compute each batch together, and so need equally many batches even of an exact share."""


Agreed: TypeAlias = Callable[[Literal["state", "epoch"], str], str]
"""Called when a shuffled pass begins, with what its order follows from; returns that of which all ranks draw it."""


def share(loader: DataLoader[Any], part: ShardChoice, agreed: Agreed = lambda _, own: own) -> DataLoader[Any]:
    """Return this rank's part of a loader, as a loader of its own.

    Args:
        loader: The loader.
        part: The share.
        agreed: See `Agreed`.

    Raises:
        DistributedError: The batch size cannot be split.
    """
    settings = {name: getattr(loader, name) for name in _SETTINGS if hasattr(loader, name)}
    if part.exact and part.together:
        return DataLoader(loader.dataset, batch_sampler=EvenBatches(loader, part), **settings)
    if isinstance(loader.dataset, IterableDataset):
        divisible = not part.exact and part.size > 1
        own = by_shards(loader.dataset, part.rank, part.size) if divisible else None
        stream: IterableDataset[Any] = EveryNth(loader.dataset, part) if own is None else own
        return DataLoader(stream, batch_size=batch_size(loader, part), drop_last=loader.drop_last, **settings)
    if loader.batch_size is None and loader.batch_sampler is not None:
        return DataLoader(loader.dataset, batch_sampler=BatchShare(loader.batch_sampler, part), **settings)
    sampler: Sampler[Any]
    if not part.exact and is_plain(loader) and getattr(loader.sampler, "generator", None) is not None:
        sampler = GeneratorShare(AgreedOrder(loader.sampler, agreed), part, drop_last=loader.drop_last)
    elif part.exact or not is_plain(loader):
        sampler = SampleShare(loader.sampler, part, drop_last=loader.drop_last)
    else:
        sampler = EpochSampler(
            loader.dataset,
            part.size,
            part.rank,
            shuffle=isinstance(loader.sampler, RandomSampler),
            seed=seed_of_shares(loader),
            drop_last=loader.drop_last,
            agreed=agreed,
        )
    return DataLoader(
        loader.dataset, batch_size=batch_size(loader, part), sampler=sampler, drop_last=loader.drop_last, **settings
    )


_KNOWN = {
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator",
    "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order",
}  # fmt: skip
"""The settings of torch (2.9 to 2.15): a library may have replaced `__init__` with a function that hides its
parameters."""
_SETTINGS = tuple(
    _KNOWN.union(inspect.signature(DataLoader.__init__).parameters)
    - {"self", "dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"}
)


def batch_size(loader: DataLoader[Any], part: ShardChoice) -> int | None:
    """Return the batch size of one rank."""
    if part.batch == "per-rank":
        return loader.batch_size
    if loader.batch_size is None:
        raise DistributedError(
            "--batch global cannot split the batches of this data loader, since its batch_size is None: "
            "leave the option out."
        )
    if loader.batch_size % part.size:
        raise DistributedError(
            f"--batch global: the batch size {loader.batch_size} does not divide by {part.size} ranks; take "
            f"{loader.batch_size // part.size * part.size or part.size} or "
            f"{(loader.batch_size // part.size + 1) * part.size}, or leave the option out."
        )
    return loader.batch_size // part.size


def seed_of_shares(loader: DataLoader[Any]) -> int:
    """Return the seed with which the shares of a plain loader are shuffled."""
    return 0 if loader.generator is None else int(loader.generator.initial_seed())


def is_plain(loader: DataLoader[Any]) -> bool:
    """Return whether a loader reads its data set in order, or shuffled as a whole."""
    sampler = loader.sampler
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]
    return type(sampler) is SequentialSampler


def draws_order(loader: DataLoader[Any]) -> bool:
    """Return whether the order of a loader may be drawn at random outside its data set."""
    is_sequential = (
        type(loader.batch_sampler) in (BatchSampler, type(None)) and type(loader.sampler) is SequentialSampler
    )
    return not isinstance(loader.dataset, IterableDataset) and not is_sequential


def shuffled() -> list[Any]:
    """Return the data sets that were shuffled on this rank."""
    return list(_passes)


def count_passes_as_rank_0(sets: Sequence[Any], samplers: Sequence[EpochSampler]) -> None:
    """Give kept data sets and samplers rank 0's numbers of passes, since ranks that were stopped in different passes
    would read shares of different orders. Collective."""
    every = object_collectives.gather([[_passes[each] for each in sets], [each.epoch for each in samplers]])
    passes, epochs = every[0]
    if all(len(one[0]) == len(passes) and len(one[1]) == len(epochs) for one in every):
        _passes.update(zip(sets, passes, strict=True))
        for sampler, epoch in zip(samplers, epochs, strict=True):
            sampler.epoch = epoch


class EpochSampler(DistributedSampler[Any]):
    """A sampler that reshuffles in every epoch without a call of `set_epoch`."""

    def __init__(self, *args: Any, agreed: Agreed = lambda _, own: own, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._begun, self._agreed = False, agreed

    def begin_at(self, epoch: int) -> None:
        """Begin with this pass, unless one has begun or the data set was shuffled before."""
        if not self._begun:
            self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        if not self._begun:
            self._begun = True
            with suppress(TypeError):  # a list, for instance, has no weak references
                self.epoch = _passes.get(self.dataset, self.epoch)
        if self.shuffle:
            self.epoch = int(self._agreed("epoch", str(self.epoch)))
        with suppress(TypeError):
            _passes[self.dataset] = self.epoch + 1
        indices = super().__iter__()
        self.epoch += 1
        return indices

    def state_dict(self) -> dict[str, int]:
        """Return the number of the next pass, for a checkpoint."""
        try:
            return {"epoch": self.epoch if self._begun else _passes.get(self.dataset, self.epoch)}
        except TypeError:
            return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._begun, self.epoch = True, state["epoch"]


class SampleShare(Sampler[Any]):
    """Every N-th index of another sampler; all ranks use the order drawn by rank 0."""

    def __init__(self, sampler: Any, part: ShardChoice, *, drop_last: bool) -> None:
        self._sampler, self._part, self._drop_last = sampler, part, drop_last

    @property
    def num_replicas(self) -> int:
        """The number of ranks that read it together; torch uses this name."""
        return self._part.size

    def __iter__(self) -> Iterator[Any]:
        return _dealt(self._pieces(), self._part, drop_last=self._drop_last)

    def _pieces(self) -> Iterator[list[Any]]:
        return _order(self._sampler, self._part)

    def __len__(self) -> int:
        return _count(len(self._sampler), self._part, drop_last=self._drop_last)


class GeneratorShare(SampleShare):
    """Every N-th index of a shuffled loader with a generator of its own: the order is that of one process, whatever the
    cell does with the generator, and each rank draws it."""

    def _pieces(self) -> Iterator[list[Any]]:
        drawn = iter(self._sampler)
        return iter(lambda: [*itertools.islice(drawn, self._part.size)], [])


class AgreedOrder(Sampler[Any]):
    """The indices that a sampler draws, on each rank those of the same state of its generator.

    Args:
        of: The sampler, whose generator is advanced as in one process.
        agreed: Returns the state to draw of, as hexadecimal digits.
    """

    def __init__(self, of: Any, agreed: Agreed) -> None:
        self._of, self._agreed = of, agreed

    def __iter__(self) -> Iterator[Any]:
        own = bytes(self._of.generator.get_state().tolist()).hex()
        if (state := self._agreed("state", own)) == own:
            yield from self._of
            return
        other = copy.copy(self._of)
        other.generator = torch.Generator(self._of.generator.device)
        other.generator.set_state(torch.tensor([*bytes.fromhex(state)], dtype=torch.uint8))
        for _, index in zip(self._of, other, strict=True):
            yield index

    def __len__(self) -> int:
        return len(self._of)


class BatchShare(Sampler[list[Any]]):
    """Every N-th batch of another batch sampler or, with `--batch global`, a part of each batch."""

    def __init__(self, sampler: Any, part: ShardChoice) -> None:
        self._sampler, self._part = sampler, part

    @property
    def num_replicas(self) -> int:
        """The number of ranks that read it together; torch uses this name."""
        return self._part.size

    def __iter__(self) -> Iterator[list[Any]]:
        part, batches = self._part, _order(self._sampler, self._part)
        if part.batch == "global":
            return ([*_dealt(iter([batch]), part, drop_last=False)] for piece in batches for batch in piece)
        return _dealt(batches, part, drop_last=False)

    def __len__(self) -> int:
        size = len(self._sampler)
        return size if self._part.batch == "global" else _count(size, self._part, drop_last=False)


class ResumableBatches(Sampler[list[Any]]):
    """The batches of a share for a loader with a `state_dict`, such as torchdata's `StatefulDataLoader`: an iterator
    over them has one, too.

    Args:
        batches: The batch sampler of the share.
        sampler: The loader's own sampler, whose random numbers the share draws.
    """

    def __init__(self, batches: Any, sampler: Any) -> None:
        self.batches, self.sampler = batches, sampler

    def __iter__(self) -> Iterator[list[Any]]:
        return ResumableIterator(self)

    def __len__(self) -> int:
        return len(self.batches)


class ResumableIterator(Iterator[list[Any]]):
    """One pass over the batches of a share, whose state is the random state of its beginning and a count."""

    def __init__(self, of: ResumableBatches) -> None:
        self._of, self._count = of, 0
        self._generator = getattr(of.sampler, "generator", None)
        self._share = getattr(of.batches, "sampler", None)
        self._batches: Iterator[list[Any]] | None = None

    def _begun(self) -> Iterator[list[Any]]:
        """Return the batches that are left. The pass begins here: the loader has drawn a seed from the generator since
        it made this iterator."""
        if self._batches is None:
            self._random = None if self._generator is None else self._generator.get_state()
            self._epoch = self._share.state_dict() if isinstance(self._share, EpochSampler) else None
            self._batches = iter(self._of.batches)
        return self._batches

    def __next__(self) -> list[Any]:
        batch = next(self._begun())
        self._count += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        self._begun()
        return {"random": self._random, "epoch": self._epoch, "batches": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._generator is not None and state["random"] is not None:
            self._generator.set_state(state["random"])
        if isinstance(self._share, EpochSampler) and state["epoch"] is not None:
            self._share.load_state_dict(state["epoch"])
        self._batches = None
        for _ in range(state["batches"]):
            next(self)
        self._count = state["batches"]


class EvenBatches(Sampler[list[Any]]):
    """An exact share with equally many batches on every rank: a smaller share has smaller batches.

    Raises:
        DistributedError: A rank would get an empty batch, or the number of samples is unknown.
    """

    def __init__(self, loader: DataLoader[Any], part: ShardChoice) -> None:
        if (
            isinstance(loader.dataset, IterableDataset)
            or loader.batch_size is None
            or not isinstance(loader.sampler, Sized)
        ):
            raise DistributedError(
                "--shard-eval cannot give every rank as many batches of a data loader that has no batch_size or no "
                "length, and a sharded model is evaluated by all ranks together: leave the option out."
            )
        size = batch_size(loader, part)
        assert size is not None
        self._share = SampleShare(loader.sampler, part, drop_last=loader.drop_last)
        whole = len(loader.sampler)
        self._count = -(-_count(whole, replace(part, rank=0), drop_last=False) // size)
        fewest = _count(whole, replace(part, rank=part.size - 1), drop_last=False)
        if fewest < self._count:
            raise DistributedError(
                f"--shard-eval: {whole} samples in batches of {size} are too few for {part.size} ranks, which evaluate "
                "a sharded model together: leave the option out."
            )

    def __iter__(self) -> Iterator[list[Any]]:
        samples = list(self._share)
        ends = [len(samples) * place // self._count for place in range(self._count + 1)]
        return (samples[begin:end] for begin, end in itertools.pairwise(ends))

    def __len__(self) -> int:
        return self._count


class AlikeOrder(Sampler[Any]):
    """A sampler, or batch sampler, whose order is the same on all ranks that read it at the same point of the cell.

    Args:
        of: The sampler.
        occasion: Returns that point, in the same words on all ranks.
    """

    def __init__(self, of: Any, occasion: Callable[[], str]) -> None:
        self._of, self._occasion = of, occasion

    def __iter__(self) -> Iterator[Any]:
        return randomness.alike(self._of, self._occasion())

    def __len__(self) -> int:
        return len(self._of)


class EveryNth(IterableDataset[Any]):
    """Every N-th sample of a stream that each rank reads in full; an incomplete last round is left out."""

    def __init__(self, stream: Any, part: ShardChoice) -> None:
        self.__dict__.update(_stream=stream, _part=part)

    @property
    def num_replicas(self) -> int:
        """The number of ranks that read it together; torch uses this name."""
        part: ShardChoice = self.__dict__["_part"]
        return part.size

    def __iter__(self) -> Iterator[Any]:
        part = self._part
        if part.exact:
            yield from itertools.islice(self._stream, part.rank, None, part.size)
            return
        for round_ in _rounds(self._stream, part.size):
            if len(round_) == part.size:
                yield round_[part.rank]

    def __len__(self) -> int:
        whole = len(self._stream)
        return _count(whole, self._part, drop_last=True)

    def __getattr__(self, name: str) -> Any:  # a worker_init_fn finds this object as the data set
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._stream, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._stream, name, value)


def _order(sampler: Any, part: ShardChoice) -> Iterator[list[Any]]:
    """Yield the elements that the sampler draws on rank 0, in pieces that fill whole rounds of the ranks; only the
    last piece is shorter. Collective for each piece, unless the share is exact, as ranks need not meet in an
    evaluation, or the sampler has no length: it may then be read element by element, so all ranks have to draw the
    same.
    """
    if not isinstance(sampler, Sized):
        yield from _rounds(sampler, part.size)
        return
    for piece in _rounds(sampler, -(-_PIECE // part.size) * part.size):
        yield piece if part.exact else _of_rank_0(piece, sampler)


def _rounds(source: Any, count: int) -> Iterator[list[Any]]:
    """Yield the elements in lists of this length, drawn with the random numbers that all ranks share. The last list is
    shorter, and may be empty."""
    with randomness.shared():
        drawn = iter(source)
    piece = [None] * count
    while len(piece) == count:
        with randomness.shared():
            piece = [*itertools.islice(drawn, count)]
        yield piece


def _of_rank_0(piece: list[Any], sampler: Any) -> list[Any]:
    try:
        return list(object_collectives.from_rank_0(piece))
    except TypeError as error:
        raise DistributedError(
            f"{type(sampler).__name__} draws a {error}, which ranks cannot exchange: let it draw numbers, strings, or "
            "lists and tuples of them."
        ) from error


def _dealt(pieces: Iterator[list[Any]], part: ShardChoice, *, drop_last: bool) -> Iterator[Any]:
    """Yield every N-th of the elements. An incomplete last round is filled from the beginning, or left out; in an
    exact share it stays incomplete."""
    first: list[Any] = []
    for piece in pieces:
        first = first or piece[: part.size]
        rest = len(piece) % part.size
        yield from itertools.islice(piece, part.rank, len(piece) - rest, part.size)
        if not rest or (drop_last and not part.exact):
            continue
        if part.rank < rest:
            yield piece[len(piece) - rest + part.rank]
        elif not part.exact:
            yield first[(part.rank - rest) % len(first)]


def _count(whole: int, part: ShardChoice, *, drop_last: bool) -> int:
    if part.exact:
        return len(range(part.rank, whole, part.size))
    return whole // part.size if drop_last else -(-whole // part.size)


def is_divided_by_others(loader: DataLoader[Any], heuristics: Heuristics) -> bool:
    """Return whether the user or a library has divided a loader among the ranks already."""
    parts = (
        loader,
        loader.sampler,
        loader.batch_sampler,
        loader.dataset,
        getattr(loader.batch_sampler, "sampler", None),
    )
    by_code = "reads-rank" in heuristics and reads_ranks(loader.dataset)
    return by_code or any(_knows_ranks(part, by_attributes="knows-ranks" in heuristics) for part in parts)


def _knows_ranks(part: Any, *, by_attributes: bool) -> bool:
    plain = (type(None), BatchSampler, RandomSampler, SequentialSampler)
    return type(part) not in plain and manual_parallelism.divides_data(part, by_attributes=by_attributes)
