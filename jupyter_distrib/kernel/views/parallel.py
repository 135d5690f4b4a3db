"""Parallel coordinates of a sweep for a saved notebook: an axis for each name that is swept and one for the metric, and
a line for each run. Kernel side; pure functions. The live view draws them itself (`parallelOf` in `static/sweep.js`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite, log

from jupyter_distrib.kernel.views.drawing import Drawing
from jupyter_distrib.kernel.views.png import GLYPH_WIDTH, SCALE, Mark, Stroke, Text
from jupyter_distrib.system.formatting import short

HEIGHT, TOP, BOTTOM, EDGE = 128, 34, 110, 60
_LOGARITHMIC = 50
"""The ratio of the largest to the smallest value from which an axis is logarithmic."""

Value = str | float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One axis: the texts at its ends, and the place of each row, 0 to 1 from below; None for a row without a value."""

    name: str
    low: str
    high: str
    places: Sequence[float | None]


def drawn(names: Sequence[str], rows: Sequence[Sequence[Value]], best: str, width: int) -> Drawing | None:
    """Return the lines of at least two rows that have all values; None if there are fewer.

    Args:
        names: The names of the axes, that of the metric last.
        rows: The value of each row on each axis; the best row first.
        best: Caption for the best row, such as `the best is lr=0.1`; empty if there is none.
        width: The width of the picture.
    """
    axes = [axis_of(name, [row[place] for row in rows]) for place, name in enumerate(names)]
    lines = [[axis.places[row] for axis in axes] for row in range(len(rows))]
    whole = [(row, [place for place in line if place is not None]) for row, line in enumerate(lines)]
    whole = [(row, line) for row, line in whole if len(line) == len(axes)]
    if len(whole) < 2:  # one line compares nothing
        return None
    across = [EDGE + place * (width - 2 * EDGE) / max(1, len(axes) - 1) for place in range(len(axes))]
    marks: list[Mark] = []
    for axis, x in zip(axes, across, strict=True):
        marks += _axis(axis, x, (width - 2 * EDGE) / max(1, len(axes) - 1))
    for row, line in reversed(whole):  # the best on top
        spots = tuple((x, BOTTOM - place * (BOTTOM - TOP)) for x, place in zip(across, line, strict=True))
        marks.append(Stroke(spots, colour="others" if row else "first", width=1.0 if row else 1.8))
    caption = f"{names[-1]} by {', '.join(names[:-1])}" + (f": {best}" if best else "")
    return Drawing(names=(), width=width, height=HEIGHT, marks=tuple(marks), left_out=0, sentences=(caption,))


def axis_of(name: str, values: Sequence[Value]) -> Axis:
    """Return an axis with numbers by size, logarithmic for positive numbers that are far apart, and other values in the
    order in which they come."""
    known = [value for value in values if value is not None and value != ""]
    numbers = [_number(value) for value in known]
    if all(number is not None for number in numbers):
        places = dict(zip(known, _scaled([number for number in numbers if number is not None]), strict=True))
    else:
        kinds = list(dict.fromkeys(known))
        places = {kind: place / (len(kinds) - 1) if len(kinds) > 1 else 0.5 for place, kind in enumerate(kinds)}
    ends = sorted(places, key=lambda value: places[value])
    low, high = (_text(ends[0]), _text(ends[-1])) if ends else ("", "")
    return Axis(
        name=name, low=low, high=high, places=[None if value is None else places.get(value) for value in values]
    )


def _scaled(numbers: Sequence[float]) -> list[float]:
    if not numbers:
        return []
    low, high = min(numbers), max(numbers)
    if low > 0 and high / low >= _LOGARITHMIC:
        numbers, low, high = [log(number) for number in numbers], log(low), log(high)
    return [(number / 2 - low / 2) / (high / 2 - low / 2) if high > low else 0.5 for number in numbers]


def _number(value: Value) -> float | None:
    try:
        number = float(value or 0)
    except ValueError:
        return None
    return number if isfinite(number) else None


def _text(value: Value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _axis(axis: Axis, x: float, room: float) -> Iterable[Mark]:
    most = max(4, int(room * SCALE / GLYPH_WIDTH) - 1)
    yield Stroke(((x, TOP), (x, BOTTOM)), colour="grid", width=1.0)
    ends = [(axis.high, TOP - 5), (axis.low, BOTTOM + 13)] if axis.high != axis.low else [(axis.low, BOTTOM + 13)]
    for text, y in [(axis.name, 13), *ends]:
        shown = short(text, most)
        yield Text(max(0, x - len(shown) * GLYPH_WIDTH / SCALE / 2), y, shown)
