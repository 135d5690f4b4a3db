"""The chart of reported numbers over steps for a saved notebook. Kernel side; pure functions of a `RunRecord`.

An SVG that is embedded as an image can neither run scripts nor use the page's colours, so it has a ground of its own,
on which its text has a contrast of 4.5 at least. The live view draws its charts itself (`static/chart.js`).
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from math import isfinite

from jupyter_distrib.kernel.record.record import RankRecord, RunRecord
from jupyter_distrib.system.formatting import short

CHARTS = 4
COLUMNS = 2
WIDTH, HEIGHT = 300, 110
TOP, BOTTOM, LEFT, RIGHT = 20, 16, 8, 66
POINTS = 600
"""The number of points of one chart, over all its ranks."""
FIRST, OTHERS, TEXT, GROUND = "#b4500b", "#47749f", "#595959", "#fafafa"

Point = tuple[float, float]
Line = tuple[int, list[Point]]
"""A line: its number, and its points."""


def chart_of(record: RunRecord) -> str:
    """Return an `<img>` with one chart for each of the first metrics that change, and the number of further ones; empty
    if no metric changes."""
    names = _names(record)
    lost = {name: _lost(record, name) for name in names}
    return drawn({name: _lines(record, name) for name in names}, "rank {}".format, lost)


def drawn(
    lines: Mapping[str, Sequence[Line]],
    name_of: Callable[[int], str],
    lost: Mapping[str, Sequence[list[Point]]] | None = None,
) -> str:
    """Return an `<img>` with one chart for each of the first metrics that change; empty if none does.

    Args:
        lines: The lines of each metric, each with a number; the one with the smallest number stands out.
        name_of: Returns the name of the line with a number.
        lost: The points of each metric that later attempts have computed again.
    """
    charts = {name: each for name, each in lines.items() if any(_changes(points) for _, points in each)}
    if not charts:
        return ""
    shown = list(charts.items())[:CHARTS]
    rows = -(-len(shown) // COLUMNS)
    width, height = WIDTH * min(COLUMNS, len(shown)), HEIGHT * rows
    parts = []
    for index, (name, each) in enumerate(shown):
        at = f"{WIDTH * (index % COLUMNS)} {HEIGHT * (index // COLUMNS)}"
        parts.append(f'<g transform="translate({at})">{_chart(name, each, name_of, (lost or {}).get(name, ()))}</g>')
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="system-ui,sans-serif" font-size="11" fill="none">'
        f'<rect width="{width}" height="{height}" rx="6" fill="{GROUND}"/>{"".join(parts)}</svg>'
    )
    data = base64.b64encode(svg.encode()).decode()
    names = escape(", ".join(short(name) for name, _ in shown))
    left = len(charts) - len(shown)
    more = f"<div>{left} more metric{'s' * (left != 1)} not drawn here</div>" if left else ""
    return (
        f'<img alt="{names} over steps" width="{width}" height="{height}" src="data:image/svg+xml;base64,{data}">{more}'
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


def _chart(name: str, lines: Sequence[Line], name_of: Callable[[int], str], lost: Sequence[list[Point]]) -> str:
    """Draw the title, the lines, and at the right the highest value, the lowest, and the last one of the line that
    stands out; dashed what later attempts have computed again."""
    xs = [x for points in (*(points for _, points in lines), *lost) for x, _ in points]
    ys = [y for points in (*(points for _, points in lines), *lost) for _, y in points]
    low, high = min(ys), max(ys)
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    across = width / ((max(xs) - min(xs)) or 1)
    parts = [
        f'<text x="{LEFT}" y="13" fill="{TEXT}" font-weight="600">{escape(short(name, 30))}</text>',
        f'<path d="M{LEFT} {TOP + height}h{width}" stroke="{TEXT}" stroke-opacity=".5"/>',
        f'<text x="{LEFT + width}" y="{HEIGHT - 3}" fill="{TEXT}" text-anchor="end">step {max(xs):g}</text>',
    ]
    first, start = min(rank for rank, _ in lines), min(xs)

    def spots(points: Sequence[Point]) -> str:
        places = ((LEFT + (x - start) * across, TOP + (1 - _share(y, low, high)) * height) for x, y in points)
        return "L".join(f"{x:.0f} {y:.1f}" for x, y in places)

    for points in lost:
        parts.append(f'<path d="M{spots(points)}" stroke="{TEXT}" stroke-dasharray="3 3" stroke-linejoin="round"/>')
    for rank, points in lines:
        style = f'stroke="{FIRST}" stroke-width="1.8"' if rank == first else f'stroke="{OTHERS}" stroke-opacity=".55"'
        parts.append(f'<path d="M{spots(points)}" {style} stroke-linejoin="round"/>')
    for y, value in ((TOP + 4, high), (TOP + height, low)):
        parts.append(f'<text x="{LEFT + width + 6}" y="{y}" fill="{TEXT}">{value:.3g}</text>')
    last = dict(lines)[first][-1][1]
    if 0.2 < (at := _share(last, low, high)) < 0.8:
        parts.append(
            f'<text x="{LEFT + width + 6}" y="{TOP + (1 - at) * height + 4:.0f}" fill="{FIRST}">{last:.3g}</text>'
        )
    if len(lines) > 1:
        parts.append(f'<text x="{LEFT}" y="{HEIGHT - 3}" fill="{FIRST}">{escape(short(name_of(first), 24))}</text>')
    return "".join(parts)


def _share(value: float, low: float, high: float) -> float:
    """Return the position of a value between the lowest and the highest: 0 to 1."""
    # Halved first: the range of two large numbers may not be a number.
    return 0.5 if low == high else (value / 2 - low / 2) / (high / 2 - low / 2)
