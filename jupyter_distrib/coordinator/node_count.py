"""The number of nodes that a pool's `nodes` asks for: `4`, or `1:4` for as many as there are. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jupyter_distrib.options import NumberRange, count_or_range


@dataclass(frozen=True, slots=True)
class NodeCount:
    """The number of nodes of a worker group."""

    most: int = 0
    """0: as few as possible."""
    step: int = 0
    """With a range, the number of nodes is a multiple of this; 0: the number is fixed."""

    @classmethod
    def of(cls, given: Mapping[str, str]) -> NodeCount:
        """Return what a pool's options ask for."""
        number = count_or_range("nodes", str(given["nodes"])) if "nodes" in given else 0
        return cls(int(number), number.step if isinstance(number, NumberRange) else 0)

    def for_ranks(self, size: int, unit: int) -> int:
        """Return the number of nodes for this many ranks of a worker group that grows by `unit` ranks: with a range,
        all nodes have equally many ranks. 0: as few nodes as possible."""
        return size * self.step // unit if self.step else self.most

    def on_each(self, unit: int) -> int:
        """Return the number of ranks on each node; 0 without a range."""
        return unit // self.step if self.step else 0
