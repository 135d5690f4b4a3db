"""Flame graphs: the Python stacks of ranks, sampled for some seconds, as one picture. Kernel side; pure functions of
the stacks.

Each box is a function, as wide as the share of the samples in which it was running; the boxes below it are the
functions that it called.
"""

from __future__ import annotations

import base64
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import PurePath

from jupyter_distrib.kernel.views import markup
from jupyter_distrib.system.formatting import rank_list
from jupyter_distrib.wire import messages as m

WIDTH, ROW = 900, 18
CHARACTER = 6.6
"""Width of a character of the font."""
LEAST_WIDTH = 1.0
BUSIEST = 10
COLORS = ("#f2b17c", "#eda36a", "#e8c27a", "#e9b49b", "#dfa58a", "#f0c58f")


@dataclass(slots=True)
class _Call:
    """A function, at one place in the stacks."""

    name: str
    count: int = 0
    called: dict[str, _Call] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FlameGraph:
    """A picture of sampled stacks; `svg` is a standalone page, whose boxes show their names."""

    ranks: tuple[int, ...]
    samples: tuple[tuple[str, ...], ...]
    """The functions of each sample, outermost first."""
    seconds: float

    @classmethod
    def of(cls, stacks: Iterable[tuple[int, Sequence[m.Frame]]], seconds: float) -> FlameGraph:
        """Return the graph of stacks, each given with its rank."""
        seen = [(rank, tuple(map(_name, frames))) for rank, frames in stacks if frames]
        return cls(tuple(sorted({rank for rank, _ in seen})), tuple(stack for _, stack in seen), seconds)

    @property
    def svg(self) -> str:
        root = _tree(self.samples)
        boxes = list(_boxes(root, 0.0, float(WIDTH), 0))
        height = ROW * (1 + max((depth for *_, depth in boxes), default=0))
        drawn = "".join(_box(node, left, width, depth, root.count) for node, left, width, depth in boxes)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
            f'viewBox="0 0 {WIDTH} {height}" font-family="monospace" font-size="11">{drawn}</svg>'
        )

    def __repr__(self) -> str:
        inside = Counter(name for stack in self.samples for name in set(stack))
        own = Counter(stack[-1] for stack in self.samples)
        total = len(self.samples)
        lines = [
            f"{share / total:5.0%}  {own[name] / total:5.0%}  {name}" for name, share in inside.most_common(BUSIEST)
        ]
        return "\n".join([self._head(), "inside   own  function", *lines])

    def _repr_html_(self) -> str:
        data = base64.b64encode(self.svg.encode()).decode()
        alt = escape(repr(self))
        return (
            f'<div>{markup.inert(escape(self._head()))}</div><img alt="{alt}" src="data:image/svg+xml;base64,{data}">'
        )

    def _head(self) -> str:
        return f"{len(self.samples)} samples of {rank_list(self.ranks)} in {self.seconds:.1f} s"


def _name(frame: m.Frame) -> str:
    return f"{frame.function} ({PurePath(frame.filename).name})"


def _tree(samples: Iterable[Sequence[str]]) -> _Call:
    root = _Call("all")
    for stack in samples:
        root.count += 1
        node = root
        for name in stack:
            node = node.called.setdefault(name, _Call(name))
            node.count += 1
    return root


def _boxes(node: _Call, left: float, width: float, depth: int) -> Iterator[tuple[_Call, float, float, int]]:
    """Yield each node that is wide enough, with its position."""
    yield node, left, width, depth
    for each in node.called.values():
        share = width * each.count / node.count
        if share >= LEAST_WIDTH:
            yield from _boxes(each, left, share, depth + 1)
        left += share


def _box(node: _Call, left: float, width: float, depth: int, total: int) -> str:
    color = COLORS[zlib.crc32(node.name.encode()) % len(COLORS)]
    room = int((width - 6) / CHARACTER)
    text = node.name if len(node.name) <= room else f"{node.name[: room - 1]}…" if room > 3 else ""
    top = ROW * depth
    return (
        f"<g><title>{escape(node.name)}: {node.count / total:.1%}</title>"
        f'<rect x="{left:.1f}" y="{top}" width="{max(0.5, width - 0.5):.1f}" height="{ROW - 1}" fill="{color}"/>'
        f'<text x="{left + 3:.1f}" y="{top + 13}" fill="#1a1a1a">{escape(text)}</text></g>'
    )
