"""Remembers the peaks that dry runs have found, for the real runs of the same cells. Kernel side, in the thread that
executes the cell."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256

from jupyter_distrib.kernel.session.cell_order import WrittenInputs
from jupyter_distrib.serialization import payload
from jupyter_distrib.wire import messages as m

MOST = 1000
"""Number of dry runs to remember."""

_Key = tuple[bytes, str, tuple[tuple[str, str], ...]]


class PredictedPeaks:
    """The peaks of dry runs, in bytes of tensors on each GPU."""

    def __init__(self) -> None:
        self.found: dict[_Key, dict[int, int]] = {}

    def put(self, cell: m.Cell, inputs: payload.Packed, setting: m.Setting, ranks: int, peak_bytes: int) -> None:
        """Remember the peak of a cell with these inputs, under a strategy on this many ranks."""
        if len(self.found) >= MOST:
            self.found.pop(next(iter(self.found)))
        key = _key(cell, inputs, setting.strategy, setting.strategy_options)
        self.found.setdefault(key, {})[ranks] = peak_bytes

    def of(
        self, cell: m.Cell, inputs: payload.Packed | WrittenInputs, strategy: str, options: Mapping[str, str]
    ) -> Mapping[int, int]:
        """Return the peak by number of ranks; empty if the cell was not played with these inputs."""
        if isinstance(inputs, WrittenInputs):
            return {}
        return self.found.get(_key(cell, inputs, strategy, options), {})


def _key(cell: m.Cell, inputs: payload.Packed, strategy: str, options: Mapping[str, str]) -> _Key:
    read = sha256(cell.source.encode())
    read.update(inputs.data)
    read.update(str([view.nbytes for view in inputs.buffers]).encode())
    return read.digest(), strategy, tuple(sorted(options.items()))
