"""The shares of data loaders that this rank reads in one run, made at their first use. Rank's main thread."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, TypeAlias
from weakref import WeakKeyDictionary, WeakSet

from torch.utils.data import DataLoader, IterableDataset

from jupyter_distrib.interfaces.strategy import StrategyRun
from jupyter_distrib.worker.autoparallel import source_location
from jupyter_distrib.worker.autoparallel.data.change_summary import ChangeSummary
from jupyter_distrib.worker.autoparallel.data.shard_samplers import ResumableBatches, ShardChoice, share
from jupyter_distrib.worker.pytorch import data_loaders

_READ = ("dataset", "sampler", "batch_sampler", "batch_size", "drop_last")
"""The attributes from which a loader's iterator is made."""
Reading: TypeAlias = Literal["whole", "divided", "evaluated"]


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
        """The shares of each loader, by the kind of reading and the length of the data set, which may have grown."""
        self._ours: WeakSet[DataLoader[Any]] = WeakSet()
        self.divides = False
        """Whether a loader was divided for a training."""

    def __contains__(self, loader: DataLoader[Any]) -> bool:
        """Return whether this loader is a share itself."""
        return loader in self._ours

    def of(self, loader: DataLoader[Any], how: Reading) -> DataLoader[Any]:
        """Return this rank's share of a loader."""
        shares = self._shares.setdefault(loader, {})
        key = how, _length(loader.dataset)
        if key not in shares:
            shares[key] = own_share = share(loader, replace(self._part, exact=how == "evaluated"))
            self._ours.add(own_share)
            if how == "divided":
                self.divides = True
                self._summary.divided(loader, own_share, source_location.current_line(self._run.filename))
        return shares[key]

    @contextmanager
    def standing_in(self, loader: DataLoader[Any], how: Reading) -> Iterator[None]:
        """Let a loader that makes iterators of its own read this rank's share, for as long as it makes one."""
        own_share, parts = self.of(loader, how), loader.__dict__
        before = {name: parts[name] for name in _READ}
        parts |= {name: own_share.__dict__[name] for name in _READ}  # torch refuses an assignment
        if callable(getattr(loader, "state_dict", None)) and own_share.batch_sampler is not None:
            parts["batch_sampler"] = ResumableBatches(own_share.batch_sampler, loader.sampler)
        self._ours.add(loader)
        try:
            yield
        finally:
            parts |= before
            self._ours.discard(loader)

    def close(self) -> None:
        """End the workers of all shares."""
        data_loaders.end_loaders([own_share for shares in self._shares.values() for own_share in shares.values()])


def _length(dataset: Any) -> int:
    return 0 if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized) else len(dataset)
