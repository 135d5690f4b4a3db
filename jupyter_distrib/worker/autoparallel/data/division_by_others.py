"""The check whether a library, the user's sampler, or the cell before the loader was made has divided a data loader
among the ranks. Decided once for each loader of a run; rank's main thread."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data import DataLoader

from jupyter_distrib.interfaces.strategy import StrategyRun
from jupyter_distrib.worker.autoparallel import guesses, source_location
from jupyter_distrib.worker.autoparallel.data.fingerprint import DataFingerprints
from jupyter_distrib.worker.autoparallel.data.shard_samplers import is_divided_by_others


class DivisionByOthers:
    """The findings on the loaders of one run.

    Args:
        run: The run.
        alone: Whether there is no other rank to divide data with.
    """

    def __init__(self, run: StrategyRun, *, alone: bool) -> None:
        self._run, self._guesses = run, guesses.made(run.options)
        self._compares = not alone and run.everyone and "divided-data" in self._guesses
        self._fingerprints = DataFingerprints(run.filename, ordered="order" in self._guesses)
        self._decided: WeakKeyDictionary[DataLoader[Any], bool] = WeakKeyDictionary()
        self.divides = False
        """Whether any loader was divided."""

    def has_divided(self, loader: DataLoader[Any]) -> bool:
        """Return whether the user or a library has divided this loader among the ranks."""
        if loader not in self._decided:
            self._decided[loader] = is_divided_by_others(loader, self._guesses) or self._differs(loader)
            self.divides = self.divides or self._decided[loader]
        return self._decided[loader]

    def look(self) -> None:
        """Read the cell's code, while it is being executed."""
        self._fingerprints.look()

    def meets(self) -> None:
        """Record that a collective of all ranks begins; in any thread."""
        self._fingerprints.meets()

    def end(self) -> None:
        """End the check, because the cell has ended: no rank has to wait for this one."""
        self._fingerprints.end()

    def _differs(self, loader: DataLoader[Any]) -> bool:
        if not self._compares:
            return False
        finding = self._fingerprints.compared(loader, source_location.current_line(self._run.filename))
        if finding.note:
            self._run.note(finding.note)
        return finding.by_hand
