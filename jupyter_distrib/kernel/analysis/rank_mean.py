"""The mean of what many ranks report, with the lowest and the highest value. Kernel side; pure functions.

Ranks report at steps of their own, and of long runs each keeps steps of its own, so there is rarely a step that all
have. A mean over whichever ranks have one would jump from step to step. `static/mean.js` does the same for the
live view; both are tested with `tests/kernel/record/golden_mean.json`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from math import fsum
from statistics import median
from typing import NamedTuple

NEARLY_ALL = 0.9
"""Share of the ranks that must have reached a step."""
TAIL = 0.1
"""Part of the axis after a rank's last step in which the rank still counts as missing: ranks rarely end at exactly
the same step."""
MOST = 300
"""Maximum number of steps with a mean."""

Curve = list[tuple[float, float]]


class Mean(NamedTuple):
    """The values of the ranks at one step."""

    step: float
    mean: float
    low: float
    high: float


def means(lines: Mapping[int, Sequence[tuple[float, float]]], ended: Collection[int] = ()) -> list[Mean]:
    """Return the mean at each step that nearly all ranks have reached; between two reports of a rank its value is
    interpolated.

    Args:
        lines: The points of each rank, (step, value).
        ended: Ranks that report nothing more, so that the mean goes on without them.
    """
    curves = {rank: sorted(dict(points).items()) for rank, points in lines.items() if points}
    found = []
    for step in _steps(curves, ended):
        values = [value for curve in curves.values() if (value := _value(curve, step)) is not None]
        found.append(Mean(step, fsum(value / len(values) for value in values), min(values), max(values)))
    return found


def stride(count: int, most: int) -> int:
    """Return the distance between the points to keep, about `most` of `count`: a power of two, so that ranks with
    different counts mostly keep points at the same steps."""
    return 1 << (max(0, -(-count // most) - 1)).bit_length()


def _steps(curves: Mapping[int, Curve], ended: Collection[int]) -> list[float]:
    """Return the steps for which there is a mean. These are steps that nearly all ranks have reported, or steps that
    nearly all have passed if there are few of the first kind."""
    if not curves:
        return []
    firsts, lasts = (sorted(curve[place][0] for curve in curves.values()) for place in (0, -1))
    tail = TAIL * (lasts[-1] - firsts[0])
    over = sorted(curve[-1][0] + tail for rank, curve in curves.items() if rank in ended)
    reports = Counter(step for curve in curves.values() for step, _ in curve)
    there = {step: bisect_right(firsts, step) - bisect_left(lasts, step) for step in sorted(reports)}
    passed = [step for step, count in there.items() if count >= NEARLY_ALL * (len(curves) - bisect_left(over, step))]
    passed = passed or [step for step, count in there.items() if count == max(there.values())]
    exact = [step for step in passed if reports[step] >= NEARLY_ALL * there[step]]
    if 3 * len(exact) < median(len(curve) for curve in curves.values()):
        exact = passed
    stride = -(-len(exact) // MOST)
    return sorted({*exact[::stride], passed[-1]})


def _value(curve: Curve, step: float) -> float | None:
    """Return a rank's value at a step, interpolated between its reports; None before the first and after the last."""
    place = bisect_left(curve, step, key=lambda point: point[0])
    if place == len(curve) or (place == 0 and step < curve[0][0]):
        return None
    after = curve[place]
    if after[0] == step:
        return after[1]
    before = curve[place - 1]
    share = (step - before[0]) / (after[0] - before[0])
    return (1 - share) * before[1] + share * after[1]
