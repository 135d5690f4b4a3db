"""The chart of reported numbers over steps for a saved notebook. Kernel side; pure functions of a `RunRecord`.

It becomes a PNG (`kernel/views/png.py`), which every front end, hosting site and export shows, with a ground of its own
on which its text has a contrast of 4.5 at least. The live view draws its charts itself (`static/chart.js`).
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from itertools import chain, cycle
from math import isfinite

from jupyter_distrib.kernel.analysis.rank_mean import means, stride
from jupyter_distrib.kernel.record.rank_record import RankRecord
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.kernel.views import png
from jupyter_distrib.kernel.views.png import GLYPH_WIDTH, SCALE, Band, Mark, Stroke, Text
from jupyter_distrib.system.formatting import short

CHARTS = 4
COLUMNS = 2
WIDTH, HEIGHT = 300, 110
TOP, BOTTOM, LEFT, RIGHT = 20, 16, 8, 66
MANY = 8
"""Maximum number of ranks with a line each; beyond it, a chart has a mean and a band."""
FIRSTS = ("first", "second", "third")
"""Colours of the highlighted lines, one for each metric of a chart."""
POINTS = 600
"""The number of points of one chart, over all its lines."""

_KIND = r"(train(?:ing)?|val(?:id(?:ation)?)?|eval|test)"
_PART = re.compile(rf"{_KIND}[/_.-](.+)|(.+)[/_.-]{_KIND}", re.IGNORECASE)

Point = tuple[float, float]
Line = tuple[int, list[Point]]
"""A line: its number, and its points."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """Charts in a grid."""

    names: tuple[str, ...]
    width: int
    height: int
    marks: tuple[Mark, ...]
    left_out: int
    """Number of metrics that have no chart here."""
    lines: Mapping[str, Sequence[Point]] = field(default_factory=dict)
    """The points of each chart's first highlighted line."""

    @property
    def title(self) -> str:
        return f"{', '.join(short(name) for name in self.names)} over steps"

    def as_png(self) -> str:
        """Return the picture, as base64."""
        return base64.b64encode(png.drawn(self.marks, self.width, self.height)).decode()

    def as_html(self) -> str:
        """Return the picture as an `<img>` with embedded data, and the number of metrics that are not drawn."""
        size = f'width="{self.width}" height="{self.height}"'
        return f'<img alt="{escape(self.title)}" {size} src="data:image/png;base64,{self.as_png()}">{self.remark}'

    @property
    def remark(self) -> str:
        """The number of metrics that are not drawn, as HTML."""
        left = self.left_out
        return f"<div>{left} more metric{'s' * (left != 1)} not drawn here</div>" if left else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartSeries:
    """The lines and the band of one metric in a chart."""

    label: str
    """Name of the highlighted line."""
    lines: Sequence[Line]
    """The lines; the one with the smallest number is highlighted."""
    lost: Sequence[list[Point]] = ()
    """Points that later attempts have repeated."""
    band: Sequence[tuple[float, float, float]] = ()
    """The lowest and the highest value at each step, drawn instead of the lines of many ranks."""

    @property
    def changes(self) -> bool:
        moved = any(y != points[0][1] for _, points in self.lines for _, y in points)
        return moved or any(edge[1:] != self.band[0][1:] for edge in self.band)


def chart_of(record: RunRecord) -> Drawing | None:
    """Return a chart for each of the first metrics that change, with `train/loss` and `val/loss` in one; None if no
    metric changes."""
    series = {name: _series(record, name) for name in _names(record)}
    groups: dict[str, list[str]] = {}
    for name in series:
        groups.setdefault(_part_and_title(name)[1], []).append(name)
    charts = {title if len(names) > 1 else names[0]: names for title, names in groups.items()}
    return _drawing(
        {
            title: [
                replace(series[name], label=_part_and_title(name)[0]) if len(names) > 1 else series[name]
                for name in names
            ]
            for title, names in charts.items()
        }
    )


def drawn(lines: Mapping[str, Sequence[Line]], name_of: Callable[[int], str]) -> Drawing | None:
    """Return a chart for each of the first metrics that change; None if none does.

    Args:
        lines: The lines of each metric, each with a number; the one with the smallest number stands out.
        name_of: Returns the name of the line with a number.
    """
    named = {
        name: ChartSeries(label=name_of(min(number for number, _ in each)) if len(each) > 1 else "", lines=each)
        for name, each in lines.items()
        if each
    }
    return _drawing({name: [each] for name, each in named.items()})


def _drawing(charts: Mapping[str, Sequence[ChartSeries]]) -> Drawing | None:
    changing = {title: each for title, each in charts.items() if any(series.changes for series in each)}
    if not changing:
        return None
    shown = list(changing.items())[:CHARTS]
    marks = (
        mark.moved(WIDTH * (index % COLUMNS), HEIGHT * (index // COLUMNS))
        for index, (title, each) in enumerate(shown)
        for mark in _chart(title, each)
    )
    return Drawing(
        names=tuple(title for title, _ in shown),
        width=WIDTH * min(COLUMNS, len(shown)),
        height=HEIGHT * -(-len(shown) // COLUMNS),
        marks=tuple(marks),
        left_out=len(changing) - len(shown),
        lines={title: _highlighted(each) for title, each in shown},
    )


def _highlighted(series: Sequence[ChartSeries]) -> list[Point]:
    lines = dict(next(each.lines for each in series if each.lines))
    return lines[min(lines)]


def _part_and_title(name: str) -> tuple[str, str]:
    """Return the data set and the quantity in a metric's name: `train`, `loss` of `train/loss` (`PART` in
    `chart.js`)."""
    found = _PART.fullmatch(name)
    return (found[1] or found[4], found[2] or found[3]) if found else (name, name)


def _names(record: RunRecord) -> list[str]:
    return list(dict.fromkeys(name for rank in record.ranks.values() for name in rank.metrics))


def _series(record: RunRecord, name: str) -> ChartSeries:
    """Return the lines of the ranks; for many ranks their mean, with a band from the lowest to the highest."""
    most = POINTS // min(MANY, len(record.ranks))
    lines = [(rank.rank, points) for rank in record.ranks.values() if (points := list(points_of(rank, name, most)))]
    lost = _lost(record, name)
    if len(lines) <= MANY:  # those of the first rank last, so that they are drawn over the others
        label = f"rank {lines[0][0]}" if len(lines) > 1 else ""
        return ChartSeries(label=label, lines=lines[::-1], lost=lost)
    ended = [rank.rank for rank in record.ranks.values() if rank.state in ("done", "failed", "lost")]
    found = means(dict(lines), ended)
    mean = [(each.step, each.mean) for each in found]
    band = [(each.step, each.low, each.high) for each in found]
    return ChartSeries(label=f"mean of {len(lines)} ranks", lines=[(0, mean)], lost=lost, band=band)


def _lost(record: RunRecord, name: str) -> list[list[Point]]:
    lines = (_reported(rank, name, lost=True) for rank in record.ranks.values())
    return [points for points in lines if points]


def points_of(rank: RankRecord, name: str, most: int) -> Iterable[Point]:
    """Yield about `most` of the points of a metric reported by a rank, including the last one."""
    points = _reported(rank, name, lost=False)
    yield from points[:: stride(len(points), most)][:-1]
    yield from points[-1:]


def _reported(rank: RankRecord, name: str, *, lost: bool) -> list[Point]:
    """Return the values that count, or (`lost`) the values of steps that a later attempt has repeated."""
    points = ((sample.step, sample.values.get(name)) for sample in rank.history if sample.lost == lost)
    return [(float(step), value) for step, value in points if value is not None and isfinite(value)]


def _chart(title: str, series: Sequence[ChartSeries]) -> Iterable[Mark]:
    """Draw the title, the bands, the lines with their names, and at the right the highest value, the lowest, and the
    last one of the first highlighted line; values that later attempts have repeated are dashed."""
    groups = [
        *(points for each in series for _, points in each.lines),
        *(points for each in series for points in each.lost),
    ]
    xs, ys = ([point[axis] for point in chain(*groups)] for axis in (0, 1))
    edges = [value for each in series for _, *both in each.band for value in both]
    low, high, start = min([*ys, *edges]), max([*ys, *edges]), min(xs)
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    across = width / ((max(xs) - start) or 1)

    def down(y: float) -> float:
        return TOP + (1 - _share(y, low, high)) * height

    def spots(points: Sequence[Point]) -> tuple[Point, ...]:
        return tuple((LEFT + (x - start) * across, down(y)) for x, y in points)

    yield Text(LEFT, 13, short(title, 40))
    for each in series:
        if each.band:
            yield Band(tuple((LEFT + (x - start) * across, down(most), down(least)) for x, least, most in each.band))
    yield Stroke(((LEFT, TOP + height), (LEFT + width, TOP + height)), colour="text", width=0.5)
    yield Text(LEFT + width, HEIGHT - 3, f"step {max(xs):g}", right=True)
    at = LEFT
    for each, own in zip(series, cycle(FIRSTS)):
        for points in each.lost:
            yield Stroke(spots(points), colour="text", dashed=True)
        first = min((number for number, _ in each.lines), default=0)
        for number, points in each.lines:
            colour, thickness = (own, 1.8) if number == first else ("others", 1.0)
            yield Stroke(spots(points), colour=colour, width=thickness)
        if label := short(each.label, 24):
            yield Text(at, HEIGHT - 3, label, colour=own)
            at += (len(label) + 1) * GLYPH_WIDTH // SCALE
    for y, value in ((TOP + 4, high), (TOP + height, low)):
        yield Text(LEFT + width + 6, y, f"{value:.3g}")
    last = _highlighted(series)[-1][1]
    if 0.2 < _share(last, low, high) < 0.8:
        yield Text(LEFT + width + 6, round(down(last) + 4), f"{last:.3g}", colour=FIRSTS[0])


def _share(value: float, low: float, high: float) -> float:
    """Return a value's position between the lowest and the highest: 0 to 1."""
    # Halved first: the range of two large numbers may not be a number.
    return 0.5 if low == high else (value / 2 - low / 2) / (high / 2 - low / 2)
