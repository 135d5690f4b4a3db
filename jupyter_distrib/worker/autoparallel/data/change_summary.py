"""Summarizes what a strategy changed in an unchanged cell, as one line for the header of the run."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from jupyter_distrib.worker.autoparallel.data.shard_samplers import (
    BatchShare,
    EpochSampler,
    EveryNth,
    GeneratorShare,
    SampleShare,
)
from jupyter_distrib.worker.autoparallel.data.stream_shares import ShardsOfStream


class ChangeSummary:
    """Changes that have not been reported yet; each is reported once."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._new: dict[str, None] = {}
        self._reported: set[str] = set()

    def wrapped(self, names: str, place: str) -> None:
        self._add(f"{names} wrapped" + (f" (optimizer of {place})" if place else ""))

    def alone(self) -> None:
        self._add("one rank trains as without a strategy")

    def left(self, names: str) -> None:
        """Drop a pending report on a model that another wrapper takes over."""
        self._new = {text: None for text in self._new if not text.startswith(f"{names} wrapped")}

    def sharded(self, name: str, count: int, units: int, kinds: str, place: str) -> None:
        parts = f" in {units} units ({kinds})" if units else ""
        at = f" (optimizer of {place})" if place else ""
        self._add(f"{name} sharded{parts}: 1/{self._size} of {count:,} parameters on each rank{at}")

    def moved(self, names: str, device: object) -> None:
        self._add(f"{names} and its batches moved to {device}")

    def divided(self, loader: DataLoader[Any], share: DataLoader[Any], place: str) -> None:
        self._add(_how(loader, share, self._size) + (f" (loader of {place})" if place else ""))
        if share.batch_size:
            self._add(f"global batch {self._size * share.batch_size} = {self._size} x {share.batch_size}")

    def news(self) -> str:
        """Return the new changes: `Net wrapped (optimizer of line 12), sampler added (loader of line 14), global batch
        256 = 8 x 32`; empty if there are none."""
        if not self._new:
            return ""
        text = ", ".join(self._new)
        self._reported |= self._new.keys()
        self._new = {}
        return text

    def _add(self, text: str) -> None:
        if text not in self._reported:
            self._new[text] = None


def _how(loader: DataLoader[Any], share: DataLoader[Any], size: int) -> str:
    if isinstance(share.dataset, ShardsOfStream):
        return f"shards of {type(loader.dataset).__name__} dealt to {size} ranks"
    if isinstance(share.dataset, EveryNth):
        return f"samples of {type(loader.dataset).__name__} dealt to {size} ranks, each of which reads all of them"
    if isinstance(share.batch_sampler, BatchShare):
        return f"batches of {type(loader.batch_sampler).__name__} dealt to {size} ranks"
    if isinstance(share.sampler, SampleShare) and not isinstance(share.sampler, GeneratorShare):
        return f"indices of {type(loader.sampler).__name__} dealt to {size} ranks"
    assert isinstance(share.sampler, (EpochSampler, GeneratorShare))
    return "sampler added"
