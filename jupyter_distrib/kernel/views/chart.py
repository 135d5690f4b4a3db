"""The chart of reported numbers over steps for a saved notebook. Kernel side; pure functions of a `RunRecord`.

It becomes a PNG (`kernel/views/png.py`), which every front end, hosting site and export shows. Its ground is
transparent, and its colours can be read on white and on black. The live view draws its charts itself
(`static/chart.js`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from math import isfinite

from jupyter_distrib.kernel.analysis.best_value import best_of
from jupyter_distrib.kernel.analysis.rank_mean import means, stride
from jupyter_distrib.kernel.record import not_finite
from jupyter_distrib.kernel.record.not_finite import NotFinite
from jupyter_distrib.kernel.record.rank_record import RankRecord
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.kernel.views.drawing import Drawing, Point
from jupyter_distrib.kernel.views.png import GLYPH_WIDTH, SCALE, Band, Mark, Spot, Stroke, Text
from jupyter_distrib.system.formatting import short

CHARTS = 4
COLUMNS = 2
WIDTH, HEIGHT = 344, 104
TOP, BOTTOM, LEFT, RIGHT = 20, 16, 54, 56
MANY = 8
"""Maximum number of ranks with a line each; beyond it, a chart has a mean and a band."""
FIRSTS = ("first", "second", "third")
"""Colours of the highlighted lines, one for each metric of a chart."""
POINTS = 450
"""The number of points of one chart, over all its lines."""

_KIND = r"(train(?:ing)?|val(?:id(?:ation)?)?|eval|test)"
_PART = re.compile(rf"{_KIND}[/_.-](.+)|(.+)[/_.-]{_KIND}", re.IGNORECASE)

Line = tuple[int, list[Point]]
"""A line: its number, and its points."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartSeries:
    """The lines and the band of one metric in a chart."""

    name: str
    """Name of the metric."""
    label: str
    """Name of the highlighted line."""
    lines: Sequence[Line]
    """The lines; the one with the smallest number is highlighted."""
    lost: Sequence[list[Point]] = ()
    """Points that later attempts have repeated."""
    band: Sequence[tuple[float, float, float]] = ()
    """The lowest and the highest value at each step, drawn instead of the lines of many ranks."""
    turned: Mapping[int, NotFinite] = field(default_factory=dict)
    """The lines, by number, whose values were nan or infinite."""
    odd: str = ""
    """A phrase on the values that were nan or infinite."""

    @property
    def changes(self) -> bool:
        moved = bool(self.turned and any(points for _, points in self.lines)) or any(
            y != points[0][1] for _, points in self.lines for _, y in points
        )
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


def drawn(
    lines: Mapping[str, Sequence[Line]],
    name_of: Callable[[int], str],
    turned: Mapping[str, Mapping[int, NotFinite]] | None = None,
) -> Drawing | None:
    """Return a chart for each of the first metrics that change; None if none does.

    Args:
        lines: The lines of each metric, each with a number; the one with the smallest number stands out.
        name_of: Returns the name of the line with a number.
        turned: The lines of each metric that were nan or infinite.
    """
    odds: Callable[[str], Mapping[int, NotFinite]] = lambda name: (turned or {}).get(name, {})  # noqa: E731
    named = {
        name: ChartSeries(
            name=name,
            label=name_of(min(number for number, _ in each)) if len(each) > 1 else "",
            lines=[(number, points) for number, points in each if points],
            turned={number: odd for number, odd in odds(name).items() if dict(each).get(number)},
            odd="; ".join(f"{name_of(number)} {odd.text}" for number, odd in sorted(odds(name).items())),
        )
        for name, each in lines.items()
        if any(points for _, points in each)
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
        sentences=tuple(_described(title, each) for title, each in shown),
    )


def _highlighted(series: Sequence[ChartSeries]) -> list[Point]:
    lines = dict(next((each.lines for each in series if each.lines), ()))
    return lines[min(lines)] if lines else []


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
    turned = {rank.rank: each for rank in record.ranks.values() if (each := rank.not_finite.get(name))}
    odd = not_finite.of_ranks(turned, sum(name in rank.metrics for rank in record.ranks.values()))
    if len(lines) <= MANY:  # those of the first rank last, so that they are drawn over the others
        label = f"rank {lines[0][0]}" if len(lines) > 1 else ""
        return ChartSeries(name=name, label=label, lines=lines[::-1], lost=lost, turned=turned, odd=odd)
    ended = [rank.rank for rank in record.ranks.values() if rank.state in ("done", "failed", "lost")]
    found = means(dict(lines), ended)
    mean = [(each.step, each.mean) for each in found]
    band = [(each.step, each.low, each.high) for each in found]
    of_mean = {0: min(turned.values(), key=lambda each: each.first)} if turned else {}
    return ChartSeries(
        name=name, label=f"mean of {len(lines)} ranks", lines=[(0, mean)], lost=lost, band=band, turned=of_mean, odd=odd
    )


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
    """Draw the title and the names of the lines, the axes with three ticks each, the bands and the lines, the last
    values at the right, a dot at the best value, and a cross where a line became nan; values that later attempts have
    repeated are dashed."""
    scales = _Scales.of(series)
    yield Text(LEFT, 13, short(title, 30))
    for each in series:
        if each.band:
            yield Band(tuple((scales.across(x), scales.down(most), scales.down(least)) for x, least, most in each.band))
    yield from scales.axes()
    at = LEFT + (len(short(title, 30)) + 2) * GLYPH_WIDTH // SCALE
    last: list[tuple[float, str, str]] = []
    for each, own in zip(series, cycle(FIRSTS)):
        for points in each.lost:
            yield Stroke(scales.spots(points), colour="text", dashed=True)
        first = min((number for number, _ in each.lines), default=0)
        for number, points in each.lines:
            colour, thickness = (own, 1.8) if number == first else ("others", 1.0)
            yield Stroke(scales.spots(points), colour=colour, width=thickness)
            if turned := each.turned.get(number):
                yield from _cross(scales.across(turned.first), scales.down(_before(points, turned.first)))
        highlighted = dict(each.lines).get(first, [])
        odd = each.turned.get(first)
        for text, colour in ((each.label, own), (each.odd, "bad")):
            if label := short(text, max(0, (WIDTH - at) * SCALE // GLYPH_WIDTH)):
                yield Text(at, 13, label, colour=colour)
                at += (len(label) + 2) * GLYPH_WIDTH // SCALE
        if highlighted:
            end = highlighted[-1][1]
            last.append((scales.down(end), odd.word if odd is not None and odd.is_now else _number(end), own))
        if (best := best_of(each.name, highlighted)) is not None:
            x, y = scales.across(best[0]), scales.down(best[1])
            yield Stroke(((x - 2.5, y), (x + 2.5, y)), colour=own, width=5)
    lowest = -99.0
    for y, text, colour in sorted(last):
        lowest = max(lowest + 12, y + 4)
        yield Text(WIDTH - RIGHT + 6, round(lowest), text, colour=colour)


@dataclass(frozen=True, slots=True)
class _Scales:
    """The scales of a chart, from steps and values to places."""

    start: float
    end: float
    low: float
    high: float

    @classmethod
    def of(cls, series: Sequence[ChartSeries]) -> _Scales:
        points = [
            *(point for each in series for _, line in each.lines for point in line),
            *(point for each in series for line in each.lost for point in line),
            *((x, edge) for each in series for x, *both in each.band for edge in both),
        ]
        steps = [*(x for x, _ in points), *(odd.first for each in series for odd in each.turned.values())]
        values = [y for _, y in points]
        return cls(min(steps), max(steps), min(values), max(values))

    def across(self, x: float) -> float:
        return LEFT + (x - self.start) * (WIDTH - LEFT - RIGHT) / ((self.end - self.start) or 1)

    def down(self, y: float) -> float:
        return TOP + (1 - _share(y, self.low, self.high)) * (HEIGHT - TOP - BOTTOM)

    def spots(self, points: Sequence[Point]) -> tuple[Spot, ...]:
        return tuple((self.across(x), self.down(y)) for x, y in points)

    def axes(self) -> Iterable[Mark]:
        """Draw a line and a number at the lowest and the highest value and between them, and the same for steps."""
        middle = self.low / 2 + self.high / 2
        for value in dict.fromkeys((self.high, middle, self.low)):
            y = self.down(value)
            yield Stroke(((LEFT, y), (WIDTH - RIGHT, y)), colour="grid", width=0.5)
            yield Text(LEFT - 5, round(y + 4), _number(value), right=True)
        half = (self.start + self.end) // 2
        yield Text(LEFT, HEIGHT - 3, f"step {self.start:g}")
        if self.start < half < self.end:
            yield Text(self.across(half) + 3 * GLYPH_WIDTH // SCALE, HEIGHT - 3, f"{half:g}", right=True)
        if self.end > self.start:
            yield Text(WIDTH - RIGHT, HEIGHT - 3, f"{self.end:g}", right=True)


def _before(points: Sequence[Point], step: float) -> float:
    """Return the value of a line at the last report before a step, else that of its first report."""
    return next((y for x, y in reversed(points) if x < step), points[0][1])


def _number(value: float) -> str:
    """Return a number in few characters: `-1.23e-5`."""
    return re.sub(r"e([+-])0*", lambda found: "e" + found[1].strip("+"), f"{value:.3g}")


def _cross(x: float, y: float) -> Iterable[Stroke]:
    for up in (-4, 4):
        yield Stroke(((x - 4, y - up), (x + 4, y + up)), colour="bad", width=1.6)


def _described(title: str, series: Sequence[ChartSeries]) -> str:
    """Return what a chart shows in one sentence: `loss fell from 2.3 to 0.13 in 153 steps, best 0.12 at step 140`."""
    return (
        f"{short(title)}: {'; '.join(map(_line_described, series))}" if len(series) > 1 else _line_described(series[0])
    )


def _line_described(series: ChartSeries) -> str:
    points = dict(series.lines)[min(number for number, _ in series.lines)] if series.lines else []
    who = series.label if series.label != series.name else ""
    name = ", ".join(filter(None, [short(series.name), who]))
    if not points:
        return f"{name} was {series.odd}"
    (start, first), (end, last) = points[0], points[-1]
    way = "fell" if last < first else "rose" if last > first else "went"
    said = f"{name} {way} from {first:.3g} to {last:.3g} in {end - start:g} step{'s' * (end - start != 1)}"
    best = best_of(series.name, points)
    marked = f"best {best[1]:.3g} at step {best[0]:g}" if best is not None and best[1] != last else ""
    return ", ".join(filter(None, [said, marked, series.odd]))


def _share(value: float, low: float, high: float) -> float:
    """Return a value's position between the lowest and the highest: 0 to 1."""
    # Halved first: the range of two large numbers may not be a number.
    return 0.5 if low == high else (value / 2 - low / 2) / (high / 2 - low / 2)
