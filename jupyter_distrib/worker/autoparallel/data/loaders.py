"""Decides which data loaders of an unchanged cell are divided among the ranks, when a loader starts to be read, and
provides the shares to read instead.

nothing is trained yet                          whole
under `torch.no_grad()`, or models in eval mode whole; with `--shard-eval`, an exact share
a sampler that handles ranks                    left alone
ranks that have divided their data              left alone
else                                            a share of equal length on every rank
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from inspect import isgeneratorfunction
from types import FunctionType
from typing import Any, Literal, Protocol, TypeAlias
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch.utils.data import DataLoader, IterableDataset

from jupyter_distrib.interfaces import identity
from jupyter_distrib.interfaces.strategy import StrategyRun
from jupyter_distrib.libraries import known, torchmetrics
from jupyter_distrib.system.nested_code import undecorated
from jupyter_distrib.system.private_torch import ITERATOR_MAKER
from jupyter_distrib.worker.autoparallel import heuristics, source_location, traced
from jupyter_distrib.worker.autoparallel.data import means
from jupyter_distrib.worker.autoparallel.data.change_summary import ChangeSummary
from jupyter_distrib.worker.autoparallel.data.consensus import DataConsensus
from jupyter_distrib.worker.autoparallel.data.fingerprint import DataFingerprints
from jupyter_distrib.worker.autoparallel.data.shard_samplers import (
    AlikeOrder,
    EpochSampler,
    ResumableBatches,
    ShardChoice,
    draws_order,
    is_divided_by_others,
    share,
)
from jupyter_distrib.worker.autoparallel.data.stream_shares import ShardsOfStream, allow_ranks, ending_together
from jupyter_distrib.worker.autoparallel.patches import Patches
from jupyter_distrib.worker.autoparallel.source_location import Calls, current_calls, place_of_calls
from jupyter_distrib.worker.pytorch import private, randomness

Reading: TypeAlias = Literal["whole", "divided", "evaluated"]
_ITERATOR_PARTS = ("dataset", "sampler", "batch_sampler", "batch_size", "drop_last")
"""The attributes that determine a loader's iterator."""
_TRAIN_FIRST = "call model.train() before"
_trained_with: WeakSet[DataLoader[Any]] = WeakSet()
"""The loaders that trained a model in this or an earlier cell, which may have left it in eval mode."""


class LoaderState(Protocol):
    """The state that the decision depends on; a `ModelDistributor` is one."""

    @property
    def active(self) -> bool: ...
    @property
    def in_training(self) -> bool: ...


class Loaders:
    """The data loaders of one run.

    Args:
        state: The state that says whether anything is trained.
        part: The choice of this rank's share.
        run: The run.
        summary: The summary, which gets each loader that is divided.
    """

    def __init__(self, state: LoaderState, part: ShardChoice, run: StrategyRun, summary: ChangeSummary) -> None:
        self._state, self._run = state, run
        self.shard_eval = "shard_eval" in run.options
        """Whether data that is read for an evaluation is divided as well."""
        self.ranks = part.size
        """Number of ranks that share the batches."""
        self._shares = LoaderShares(part, run, summary)
        self._others = DivisionByOthers(run, alone=part.size == 1)
        self._last: WeakKeyDictionary[DataLoader[Any], Reading] = WeakKeyDictionary()
        self._measured: WeakKeyDictionary[DataLoader[Any], tuple[str, str]] = WeakKeyDictionary()
        """Loaders whose whole length was read and that may be divided later, with the place, and what to do."""
        self._counted: WeakKeyDictionary[DataLoader[Any], str] = WeakKeyDictionary()
        """Loaders whose share's length was read before the loader was, with the place."""
        self._patches = Patches()
        self._watched: set[type] = {DataLoader}
        """The classes of loaders whose reading is routed through this object."""
        self._find_optimizers: Callable[[], None] = lambda: None
        self.read_last: Reading = "whole"
        """The kind of reading of the most recent loader."""
        self._latest: DataLoader[Any] | None = None
        """That loader, which checks after its loop need: the loop may be its only other owner."""
        self._searched = WeakKeyDictionary[DataLoader[Any], set[str]]()
        """The places, by loader, after whose loop a mean over all samples was already searched for."""
        self._means: set[tuple[str, str]] = set()
        """Divisors for which there is a note, with their places."""
        self.read_early = False
        """Whether a model is trained with a loader whose reading began before anything was trained."""
        self._left: dict[str, int] = {}
        """The number of backward passes before each place where a share was last read."""
        self._trained_in: set[str] = set()
        """The places of loops over shares in which a model was trained."""
        self._trained_inside = 0
        """Number of backward passes each of which followed a batch of a share that was being read."""
        self._has_delivered = False
        """Whether a share that is being read has yielded a batch since the last backward pass."""
        self._buffered: dict[str, tuple[int, int]] = {}
        """The numbers of all backward passes and of those in loops over shares, when the cell had read all batches of a
        share at this place and kept them."""
        self._habits: WeakKeyDictionary[DataLoader[Any], dict[object, bool]] = WeakKeyDictionary()
        """For each place where a loader was read and the steps of the loop set the mode: whether it was trained with.
        The mode at the beginning of such a loop is left from the loop before."""
        self._shuffled_at: Counter[Calls] = Counter()
        """The number of shuffled passes that began at each line, from wherever its function was called."""
        self.backwards = 0
        """Number of backward passes in this run."""
        self._evaluations: Counter[str] = Counter()
        """Number of evaluations since the last backward pass, by place."""
        self._evaluation = ""
        """The place of the most recent one, and its number there."""
        self.device: torch.device | None = None
        """Device to which batches are moved; None leaves them where the loader created them."""

    @property
    def divides(self) -> bool:
        """Return whether a loader was divided, by this class, the user or a library."""
        return self._shares.divides or self._others.divides

    @property
    def share_of_batch(self) -> int | None:
        """Number of samples in a rank's part of a batch that `--batch global` splits; None if it is not known."""
        loader = self._latest
        return loader.batch_size // self.ranks if loader is not None and loader.batch_size else None

    def install(self, patches: Patches, find_optimizers: Callable[[], None]) -> None:
        """Route the reading of every loader through this object; `find_optimizers` is called before each decision."""
        self._find_optimizers = find_optimizers
        self._patches = patches
        patches.replace(DataLoader, "__iter__", self._reading)
        patches.replace(DataLoader, "__setattr__", self._noticing)
        for cls in loader_classes():
            self._watch(cls)
        patches.replace(DataLoader, "__len__", self._measuring)
        patches.replace(torch.nn.Module, "train", traced.setting_mode)
        torchmetrics.follow(self.reads_all)

    def reads_all(self) -> bool:
        """Return whether every rank has all batches of the most recent loader."""
        loader = self._latest
        return loader is not None and self.read_last == "whole" and not self._others.has_divided(loader)

    def close(self) -> None:
        """End the workers of all shares; no rank has to wait for this one."""
        torchmetrics.follow()
        self._latest = None
        self._others.end()
        self._shares.close()

    def divided(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Return this rank's share, or the loader itself if the user or a library has divided it already."""
        return loader if self._others.has_divided(loader) else self._shares.of(loader, "divided")

    def goes_backward(self) -> None:
        """Record that a backward pass starts."""
        self.backwards += 1
        self._trained_inside += self._has_delivered
        self._has_delivered = False
        self._evaluations.clear()
        if self.backwards == 1:
            self._others.inspect_code()

    def on_collective(self) -> None:
        """Record that a collective of all ranks starts, so that no rank waits for this one elsewhere."""
        self._others.on_collective()

    def _noticing(self, original: Any) -> Any:
        def __setattr__(loader: DataLoader[Any], name: str, value: Any) -> None:  # noqa: N807
            self._watch(type(loader))
            original(loader, name, value)

        return __setattr__

    def _watch(self, cls: type) -> None:
        """Route the reading of a class through this object if it does not go through `DataLoader.__iter__`. A
        generator that reads a `DataLoader` goes through it, and any other is detected by equal losses on the ranks."""
        for base in cls.__mro__:
            if base in self._watched or not issubclass(base, DataLoader):
                continue
            self._watched.add(base)
            own = vars(base).get("__iter__")
            if isinstance(own, FunctionType) and not isgeneratorfunction(own) and not is_ours(own):
                self._patches.replace(base, "__iter__", self._reading)

    def _reading(self, original: Any) -> Any:
        def __iter__(loader: DataLoader[Any]) -> Any:  # noqa: N807
            if loader in self._shares:
                return self._placed(original(loader))
            self._find_optimizers()
            allow_ranks(loader.dataset)
            how = self._last[loader] = self.read_last = self._decided(loader)
            self._latest = loader
            if how != "whole":
                share = self._share_read(loader, how, original)
                return self._watched_share(loader, share, current_calls()) if how == "divided" else share
            self._check_length(loader)
            if self._measured.get(loader, ("", ""))[1] is _TRAIN_FIRST:
                del self._measured[loader]
            batches = self._placed(self._whole_read(loader, original))
            if not self._state.active:
                where = source_location.current_line(self._run.filename)
                return EarlyReading(batches, partial(self._note_if_early, loader, where), lambda: self.backwards)
            if torch.is_grad_enabled() and not self._others.has_divided(loader):
                return self._watched_whole(loader, batches, current_calls())
            return batches

        return __iter__

    def _measuring(self, original: Any) -> Any:
        def __len__(loader: DataLoader[Any]) -> int:  # noqa: N807
            if loader in self._shares:
                return int(original(loader))
            self._find_optimizers()
            # The length is that of the last reading: `total / len(loader)` often stands behind the loop.
            how = self._last.get(loader) or ("whole" if known.prepares_loaders() else self._expected(loader))
            if loader not in self._last and how == "whole" and loader not in self._measured:
                self._note_length(loader)
            if how == "whole":
                return int(original(loader))
            if loader not in self._last:
                self._counted.setdefault(loader, source_location.current_line(self._run.filename))
            return len(self._shares.of(loader, how))

        return __len__

    def _check_length(self, loader: DataLoader[Any]) -> None:
        """Add a note if the length of a share was read and a library has divided the data then."""
        for other, where in list(self._counted.items()):
            if other not in self._last and other.dataset is loader.dataset and known.prepares_loaders():
                del self._counted[other]
                self._run.note(
                    f"len() of a data loader, called on {where} before the Accelerator existed, counted only this "
                    "rank's batches, but Accelerate expects the total: create the Accelerator first"
                )

    def _note_length(self, loader: DataLoader[Any]) -> None:
        """Record that the length of a loader was that of the whole one, if a share of it may still be read."""
        where = source_location.current_line(self._run.filename)
        if not self._state.active:
            self._measured[loader] = f"{where} before there was an optimizer", "call len() after the optimizer is made"
        elif known.prepares_loaders():
            self._measured[loader] = f"{where} beside an Accelerator", "have the Accelerator prepare() the loader"
        elif torch.is_grad_enabled() and not self._state.in_training and not self._others.has_divided(loader):
            self._measured[loader] = f"{where} while no model was in training mode", _TRAIN_FIRST

    def _share_read(self, loader: DataLoader[Any], how: Reading, original: Any) -> Iterator[Any]:
        """Return the batches of this rank's share, read by the loader itself if its class has its own iterators."""
        own_share = self._shares.of(loader, how)
        if isinstance(own_share.dataset, ShardsOfStream):
            own_share.dataset.follow()
        self._continue_orders(own_share)
        # A stream is drawn alike on all ranks, also by workers, whose seeds the iterator draws.
        with randomness.shared() if isinstance(own_share.dataset, IterableDataset) else nullcontext():
            if makes_own_iterators(type(loader)):
                with self._shares.standing_in(loader, how):
                    batches = self._placed(iter(original(loader)))
            else:
                batches = iter(own_share)
        return ending_together(batches) if isinstance(own_share.dataset, ShardsOfStream) else batches

    def _continue_orders(self, own_share: DataLoader[Any]) -> None:
        """Have a new loader shuffle differently from the previous one at this line. The data set may be new as well, or
        a list of samples, whose passes cannot be counted."""
        if isinstance(sampler := own_share.sampler, EpochSampler) and sampler.shuffle:
            sampler.begin_at(self._shuffled_at[line := current_calls()[:1]])
            self._shuffled_at[line] += 1

    def _whole_read(self, loader: DataLoader[Any], original: Any) -> Any:
        """Return all batches of a loader; of an evaluation in an order that is the same on all ranks, so that numbers
        which depend on it are, too: of the first few batches, or with a last one that is smaller or dropped."""
        trains = torch.is_grad_enabled() and self._trains(loader)
        if trains or not self._state.active or not draws_order(loader) or makes_own_iterators(type(loader)):
            return original(loader)
        place = place_of_calls()
        self._evaluations[place] += 1
        self._evaluation = f"{place}/{self._evaluations[place]}"
        name, parts = "sampler" if loader.batch_sampler is None else "batch_sampler", loader.__dict__
        if (sampler := parts.get(name)) is None:  # a property of the user's class
            return original(loader)
        parts[name] = AlikeOrder(sampler, self._this_evaluation)  # torch refuses an assignment
        try:
            return original(loader)
        finally:
            parts[name] = sampler

    def _this_evaluation(self) -> str:
        """Return the evaluation's place and number there since the last backward pass: rank 0 may have evaluated
        alone."""
        return f"evaluation {self._evaluation} after {self.backwards}"

    def _decided(self, loader: DataLoader[Any]) -> Reading:
        if not self._state.active:
            return "whole"
        if torch.is_grad_enabled() and self._trains(loader):
            return "whole" if self._others.has_divided(loader) else "divided"
        return "evaluated" if self.shard_eval and not self._others.has_divided(loader) else "whole"

    def _expected(self, loader: DataLoader[Any]) -> Reading:
        """Return how a loader will be read that this cell has not read yet."""
        again = loader in _trained_with and self._state.active and torch.is_grad_enabled()
        return "divided" if again and not self._others.has_divided(loader) else self._decided(loader)

    def _trains(self, loader: DataLoader[Any]) -> bool:
        """Return whether a loader is read for training, by the mode or by what its loop did the last time."""
        habits = self._habits.get(loader)
        habit = habits.get(current_calls()) if habits else None
        return self._state.in_training if habit is None else habit

    def _noting_habit(self, loader: DataLoader[Any], batches: Iterator[Any], calls: object) -> Iterator[Any]:
        """Yield the batches, and record what the loop does with the first one if it sets the mode of a module."""
        for first in batches:
            mark, before = traced.modes.mark(), self.backwards
            yield first
            trained = self.backwards > before
            if traced.modes.mark() is not mark and (trained or not known.adds_up_metrics()):
                self._habits.setdefault(loader, {})[calls] = trained
            del first
            break
        yield from batches

    def _watched_share(self, loader: DataLoader[Any], batches: Iterator[Any], calls: Calls) -> Iterator[Any]:
        where, before = source_location.current_line(self._run.filename), self.backwards
        if (measured := self._measured.pop(loader, None)) is not None:
            when, advice = measured
            self._run.note(
                f"len() of a data loader, called on {when}, was that of the whole loader; read on {where}, each rank "
                f"has a share: {advice}"
            )
        self._note_mean(loader, where)
        firsts: list[ref[torch.Tensor]] = []
        read = 0
        try:
            for batch in self._noting_habit(loader, batches, calls):
                if read == 0:
                    firsts = [ref(each) for each in private.tree_leaves(batch) if isinstance(each, torch.Tensor)]
                read += 1
                self._has_delivered = True
                self._left[where] = before
                yield batch
                del batch
        finally:
            self._has_delivered = False
            if self.backwards > before:
                self._trained_in.add(where)
                _trained_with.add(loader)
        if read and self.backwards == before:
            self._left.pop(where, None)  # another loader may have been read on this line
            if read > 1 and any(each() is not None for each in firsts):
                self._buffered[where] = self.backwards, self._trained_inside
            else:
                self._note_untrained(where)

    def _note_mean(self, loader: DataLoader[Any], where: str) -> None:
        """Add a note if the code behind this loop over a share divides by the number of all samples."""
        if where in (places := self._searched.setdefault(loader, set())):
            return
        places.add(where)
        if (mean := means.over_all_samples(loader, self._run.filename)) and mean not in self._means:
            self._means.add(mean)
            divisor, place = mean
            self._run.note(
                f"`{divisor}` on {place} is the number of all samples, and each rank has read a share of them on "
                f"{where}: what is divided by it is too small. Divide by the number of samples that the loop has read"
            )

    def note_if_untrained(self) -> None:
        """Add a note on each loader that was divided, and left before its end (`next(iter(loader))`) or kept as a list
        of its batches, with nothing trained on these since then; called when the cell has ended well."""
        for where, (backwards, inside) in self._buffered.items():
            if self.backwards - backwards <= self._trained_inside - inside:
                self._note_untrained(where)
        for where, before in self._left.items():
            if self.backwards == before and where not in self._trained_in:
                self._note_untrained(where)

    def _note_untrained(self, where: str) -> None:
        self._run.note(
            f"each rank has read its share only on {where}, where nothing was trained: read under torch.no_grad() "
            "or in eval mode, the loader is whole"
        )

    def _watched_whole(self, loader: DataLoader[Any], batches: Iterator[Any], calls: object) -> Iterator[Any]:
        where, before = source_location.current_line(self._run.filename), self.backwards
        batches = self._noting_habit(loader, batches, calls)
        for batch in batches:
            yield batch
            if self.backwards > before:  # the loop may be left at any time
                self._run.note(
                    f"every rank has trained with all batches that were read on {where}, since the model was in eval "
                    "mode: with model.train(), each rank gets its share"
                )
                break
        yield from batches

    def _note_if_early(self, loader: DataLoader[Any], where: str) -> None:
        """Add a note for a loader that all ranks read completely, as no optimizer existed when its reading began."""
        if self._state.active and not self._others.has_divided(loader):
            self.read_early = True
            self._run.note(
                f"every rank trains with all batches of the data loader that is read from {where} on, since that began "
                "before there was an optimizer: build the optimizer first, or call iter() again behind it"
            )

    def _placed(self, batches: Iterator[Any]) -> Iterator[Any]:
        return batches if self.device is None else (moved(batch, self.device) for batch in batches)


class EarlyReading(Iterator[Any]):
    """The batches of a loader whose reading begins before anything is trained.

    Args:
        batches: The batches, with all that torch's iterator can do.
        on_training: Called once if a model is trained meanwhile.
        backwards: Returns the number of backward passes.
    """

    def __init__(self, batches: Iterator[Any], on_training: Callable[[], None], backwards: Callable[[], int]) -> None:
        self._batches, self._on_training, self._backwards = batches, on_training, backwards
        self._before, self._open, self._begun = backwards(), True, False

    def __next__(self) -> Any:
        if self._open and self._begun and self._backwards() > self._before:
            self._open = False
            self._on_training()
        self._begun = True
        return next(self._batches)

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_batches", "_on_training", "_backwards", "_before", "_open", "_begun"):
            raise AttributeError(name)
        return getattr(self._batches, name)


def loader_classes() -> list[type]:
    """Return all loader classes defined so far."""
    found: list[Any] = [DataLoader]
    for cls in found:
        found += {*cls.__subclasses__()} - {*found}
    return found


def is_ours(function: FunctionType) -> bool:
    """Return whether a function is part of this package."""
    return function.__module__.startswith("jupyter_distrib.")


def makes_own_iterators(cls: type) -> bool:
    """Return whether a loader class has its own way of reading."""
    bases = cls.__mro__[: cls.__mro__.index(DataLoader)]
    names = ("__iter__", ITERATOR_MAKER)
    own: list[Any] = [undecorated(vars(base)[name]) for base in bases for name in names if name in vars(base)]
    return any(not is_ours(each) and not isgeneratorfunction(each) for each in own)


def moved(batch: Any, device: torch.device) -> Any:
    """Return the batch with its tensors on the device; unusual containers are left alone."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return type(batch)({key: moved(value, device) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(moved(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(moved(value, device) for value in batch)
    return batch


class LoaderShares:
    """The shares of this rank, by the loaders of the cell.

    Args:
        part: The choice of the share.
        run: The run.
        summary: The summary, which gets each loader that is divided.
    """

    def __init__(self, part: ShardChoice, run: StrategyRun, summary: ChangeSummary) -> None:
        self._part, self._run, self._summary = part, run, summary
        self._shares: WeakKeyDictionary[DataLoader[Any], dict[tuple[Reading, int], DataLoader[Any]]]
        self._shares = WeakKeyDictionary()
        """Shares of each loader, by how it is read and by the length of the data set, which may have grown."""
        self._ours: WeakSet[DataLoader[Any]] = WeakSet()
        self._consensus = DataConsensus(ordered=False)
        self.divides = False
        """Whether a loader was divided for training."""

    def __contains__(self, loader: DataLoader[Any]) -> bool:
        """Return whether this loader is a share itself."""
        return loader in self._ours

    def of(self, loader: DataLoader[Any], how: Reading) -> DataLoader[Any]:
        """Return this rank's share of a loader."""
        shares = self._shares.setdefault(loader, {})
        key = how, _length(loader.dataset)
        if key not in shares:
            part = replace(self._part, exact=how == "evaluated")
            shares[key] = own_share = share(loader, part, self._of_first)
            self._ours.add(own_share)
            if how == "divided":
                self.divides = True
                self._summary.divided(loader, own_share, source_location.current_line(self._run.filename))
        return shares[key]

    def _of_first(self, kind: Literal["state", "epoch"], own: str) -> str:
        """Return what the order of this pass follows from on the rank that begins it first: another rank may have read
        the loader, or drawn from its generator, before."""
        first = own if identity.world_size() == 1 else self._consensus.first(f"{kind}/{place_of_calls()}", own)
        if kind == "state" and first != own:
            where = source_location.current_line(self._run.filename)
            self._run.note(
                f"the generator of the data loader read on {where} has different states on different ranks, and all of "
                "them have shuffled with that of one rank: seed it alike on all ranks, and draw nothing else from it"
            )
        return first

    @contextmanager
    def standing_in(self, loader: DataLoader[Any], how: Reading) -> Iterator[None]:
        """Make a loader that has its own iterators read this rank's share, while it creates one."""
        own_share, parts = self.of(loader, how), loader.__dict__
        before = {name: parts[name] for name in _ITERATOR_PARTS}
        parts |= {name: own_share.__dict__[name] for name in _ITERATOR_PARTS}  # torch refuses an assignment
        if callable(getattr(loader, "state_dict", None)) and own_share.batch_sampler is not None:
            parts["batch_sampler"] = ResumableBatches(own_share.batch_sampler, before["sampler"])
        self._ours.add(loader)
        try:
            yield
        finally:
            parts |= before
            self._ours.discard(loader)

    def close(self) -> None:
        """End the workers of all shares."""
        private.end_loaders([own_share for shares in self._shares.values() for own_share in shares.values()])


def _length(dataset: Any) -> int:
    return 0 if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized) else len(dataset)


class DivisionByOthers:
    """Finds out which loaders of one run were divided by the user or a library.

    Args:
        run: The run.
        alone: Whether there is no other rank to share data with.
    """

    def __init__(self, run: StrategyRun, *, alone: bool) -> None:
        self._run, self._heuristics = run, heuristics.enabled(run.options)
        self._compares = not alone and run.everyone and "divided-data" in self._heuristics
        self._fingerprints = DataFingerprints(run.filename, ordered="order" in self._heuristics)
        self._decided: WeakKeyDictionary[DataLoader[Any], bool] = WeakKeyDictionary()
        self.divides = False
        """Whether any loader was divided."""

    def has_divided(self, loader: DataLoader[Any]) -> bool:
        """Return whether the user or a library has divided this loader among the ranks."""
        if loader not in self._decided:
            self._decided[loader] = is_divided_by_others(loader, self._heuristics) or self._differs(loader)
            self.divides = self.divides or self._decided[loader]
        return self._decided[loader]

    def inspect_code(self) -> None:
        """Inspect the cell's code while it is being executed."""
        self._fingerprints.inspect_code()

    def on_collective(self) -> None:
        """Record that a collective of all ranks begins; in any thread."""
        self._fingerprints.on_collective()

    def end(self) -> None:
        """End the check, because the cell has ended and no rank has to wait for this one."""
        self._fingerprints.end()

    def _differs(self, loader: DataLoader[Any]) -> bool:
        if not self._compares:
            return False
        finding = self._fingerprints.compared(loader, source_location.current_line(self._run.filename))
        if finding.note:
            self._run.note(finding.note)
        return finding.on_purpose
