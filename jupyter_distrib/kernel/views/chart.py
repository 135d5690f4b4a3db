"""The chart of reported numbers over steps for a saved notebook. Kernel side; pure functions of a `RunRecord`.

It becomes a PNG (`kernel/views/png.py`), which every front end, hosting site and export shows, with a ground of its own
on which its text has a contrast of 4.5 at least. The live view draws its charts itself (`static/chart.js`).
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain
from math import isfinite

from jupyter_distrib.kernel.record.rank_record import RankRecord
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.kernel.views import png
from jupyter_distrib.kernel.views.png import Mark, Stroke, Text
from jupyter_distrib.system.formatting import short

CHARTS = 4
COLUMNS = 2
WIDTH, HEIGHT = 300, 110
TOP, BOTTOM, LEFT, RIGHT = 20, 16, 8, 66
POINTS = 600
"""The number of points of one chart, over all its ranks."""

Point = tuple[float, float]
Line = tuple[int, list[Point]]
"""A line: its number, and its points."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """Charts beside and below one another."""

    names: tuple[str, ...]
    width: int
    height: int
    marks: tuple[Mark, ...]
    left_out: int
    """The number of metrics that have no chart here."""

    @property
    def title(self) -> str:
        return f"{', '.join(short(name) for name in self.names)} over steps"

    def as_png(self) -> str:
        """Return the picture, as base64."""
        return base64.b64encode(png.drawn(self.marks, self.width, self.height)).decode()

    def as_html(self) -> str:
        """Return the picture as an `<img>` that holds it, and the number of metrics that are not drawn."""
        size = f'width="{self.width}" height="{self.height}"'
        return f'<img alt="{escape(self.title)}" {size} src="data:image/png;base64,{self.as_png()}">{self.remark}'

    @property
    def remark(self) -> str:
        """The number of metrics that are not drawn, as HTML."""
        left = self.left_out
        return f"<div>{left} more metric{'s' * (left != 1)} not drawn here</div>" if left else ""


def chart_of(record: RunRecord) -> Drawing | None:
    """Return one chart for each of the first metrics that change; None if no metric changes."""
    names = _names(record)
    lost = {name: _lost(record, name) for name in names}
    return drawn({name: _lines(record, name) for name in names}, "rank {}".format, lost)


def drawn(
    lines: Mapping[str, Sequence[Line]],
    name_of: Callable[[int], str],
    lost: Mapping[str, Sequence[list[Point]]] | None = None,
) -> Drawing | None:
    """Return one chart for each of the first metrics that change; None if none does.

    Args:
        lines: The lines of each metric, each with a number; the one with the smallest number stands out.
        name_of: Returns the name of the line with a number.
        lost: The points of each metric that later attempts have computed again.
    """
    charts = {name: each for name, each in lines.items() if any(_changes(points) for _, points in each)}
    if not charts:
        return None
    shown = list(charts.items())[:CHARTS]
    marks = (
        mark.moved(WIDTH * (index % COLUMNS), HEIGHT * (index // COLUMNS))
        for index, (name, each) in enumerate(shown)
        for mark in _chart(name, each, name_of, (lost or {}).get(name, ()))
    )
    return Drawing(
        names=tuple(name for name, _ in shown),
        width=WIDTH * min(COLUMNS, len(shown)),
        height=HEIGHT * -(-len(shown) // COLUMNS),
        marks=tuple(marks),
        left_out=len(charts) - len(shown),
    )


def _names(record: RunRecord) -> list[str]:
    return list(dict.fromkeys(name for rank in record.ranks.values() for name in rank.metrics))


def _changes(points: Sequence[Point]) -> bool:
    return any(y != points[0][1] for _, y in points)


def _lines(record: RunRecord, name: str) -> list[Line]:
    """Return the points of each rank; those of the first rank last, so that they are drawn over the others."""
    most = max(20, POINTS // len(record.ranks))
    lines = [(rank.rank, list(points_of(rank, name, most))) for rank in record.ranks.values()]
    return [(rank, points) for rank, points in reversed(lines) if points]


def _lost(record: RunRecord, name: str) -> list[list[Point]]:
    lines = (_reported(rank, name, lost=True) for rank in record.ranks.values())
    return [points for points in lines if points]


def points_of(rank: RankRecord, name: str, most: int) -> Iterable[Point]:
    """Yield at most about `most` of the points of a metric that a rank reported, the last one among them."""
    points = _reported(rank, name, lost=False)
    yield from points[:: -(-len(points) // most) or 1][:-1]
    yield from points[-1:]


def _reported(rank: RankRecord, name: str, *, lost: bool) -> list[Point]:
    """Return the reported values; those that count, or those of steps that a later attempt has computed again."""
    points = ((sample.step, sample.values.get(name)) for sample in rank.history if sample.lost == lost)
    return [(float(step), value) for step, value in points if value is not None and isfinite(value)]


def _chart(
    name: str, lines: Sequence[Line], name_of: Callable[[int], str], lost: Sequence[list[Point]]
) -> Iterable[Mark]:
    """Draw the title, the lines, and at the right the highest value, the lowest, and the last one of the line that
    stands out; dashed what later attempts have computed again."""
    groups = [*(points for _, points in lines), *lost]
    xs, ys = ([point[axis] for point in chain(*groups)] for axis in (0, 1))
    low, high, start = min(ys), max(ys), min(xs)
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    across = width / ((max(xs) - start) or 1)
    first = min(rank for rank, _ in lines)

    def spots(points: Sequence[Point]) -> tuple[Point, ...]:
        return tuple((LEFT + (x - start) * across, TOP + (1 - _share(y, low, high)) * height) for x, y in points)

    yield Text(LEFT, 13, short(name, 40))
    yield Stroke(((LEFT, TOP + height), (LEFT + width, TOP + height)), colour="text", width=0.5)
    yield Text(LEFT + width, HEIGHT - 3, f"step {max(xs):g}", right=True)
    for points in lost:
        yield Stroke(spots(points), colour="text", dashed=True)
    for rank, points in lines:
        colour, thickness = ("first", 1.8) if rank == first else ("others", 1.0)
        yield Stroke(spots(points), colour=colour, width=thickness)
    for y, value in ((TOP + 4, high), (TOP + height, low)):
        yield Text(LEFT + width + 6, y, f"{value:.3g}")
    last = dict(lines)[first][-1][1]
    if 0.2 < (at := _share(last, low, high)) < 0.8:
        yield Text(LEFT + width + 6, round(TOP + (1 - at) * height + 4), f"{last:.3g}", colour="first")
    if len(lines) > 1:
        yield Text(LEFT, HEIGHT - 3, short(name_of(first), 24), colour="first")


def _share(value: float, low: float, high: float) -> float:
    """Return the position of a value between the lowest and the highest: 0 to 1."""
    # Halved first: the range of two large numbers may not be a number.
    return 0.5 if low == high else (value / 2 - low / 2) / (high / 2 - low / 2)
