"""The progress of a rank's nested loops, outermost first, after one of them has moved on. Kernel side; pure."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from jupyter_distrib.kernel.record.terminal_stream import Progress
from jupyter_distrib.wire import messages as m

NESTED_BARS = 3
"""Number of nested loops to keep: the innermost ones."""


def moved_on(bars: tuple[Progress, ...], event: m.Progressed) -> tuple[Progress, ...]:
    """Update a loop's progress, and drop the loops inside it."""
    index = next((i for i, old in enumerate(bars) if old.label == event.label), None)
    if index is None:
        outer, rate = tuple(old for old in bars if not old.finished), None
    else:
        # An outer loop moves on only when the loops inside it are over, so those are dropped.
        outer, rate = bars[:index], _smoothed_rate(bars[index], event)
    new = Progress(label=event.label, step=event.step, total=event.total, rate=rate, at_s=event.at_s)
    return (*outer, new)[-NESTED_BARS:]


def _smoothed_rate(old: Progress, event: m.Progressed) -> float | None:
    seconds, steps = event.at_s - old.at_s, event.step - old.step
    if steps < 0:  # the loop was begun again
        return None
    if seconds <= 0:
        return old.rate
    return steps / seconds if old.rate is None else 0.7 * old.rate + 0.3 * steps / seconds


def drawn(bars: tuple[Progress, ...], depth: int | None, bar: Progress | None) -> tuple[Progress, ...]:
    """Update tqdm's bar at its depth, and drop the bars below it; `bar` None clears it, `depth` None means not known
    yet."""
    if depth is None:
        same = (i for i, old in enumerate(bars) if bar and (old.label, old.total) == (bar.label, bar.total))
        depth = next(same, 0)
    return (bars[:depth] + ((bar,) if bar else ()))[-NESTED_BARS:]


def seconds_left(bars: tuple[Progress, ...]) -> float | None:
    """Return the seconds until the outermost loop ends, by its own pace, or by that of the innermost loop while its
    own is unknown (`secondsLeft` in `static/state.js`); None if unknown."""
    outer, *inner = bars or (None,)
    if outer is None or not outer.total or outer.finished:
        return None
    share = 0.0
    for bar in reversed(inner):
        share = min(1.0, (bar.step + share) / bar.total) if bar.total else 0.0
    left = outer.total - outer.step - share
    if outer.rate:
        return left / outer.rate
    rounds = prod(bar.total or 0 for bar in inner)
    return left * rounds / bars[-1].rate if inner and rounds and bars[-1].rate else None


def with_inner(bars: tuple[Progress, ...], before: tuple[Progress, ...]) -> tuple[Progress, ...]:
    """Return the bars, with the inner loops as before unless their next round has begun."""
    if _totals(bars) == _totals(before)[: len(bars)]:
        return (*bars, *(replace(bar, step=0) for bar in before[len(bars) :]))
    return bars


def steps_on(before: tuple[Progress, ...], now: tuple[Progress, ...]) -> float | None:
    """Return the number of steps of a rank's innermost loop between two observations; None if the count has restarted.

    Loops are told apart by their totals, since descriptions change as they go. A loop counts as done once another
    loop has followed it.
    """
    old, new = _totals(before), _totals(now)
    if len(old) < len(new) and old == new[: len(old)]:
        return None  # a loop inside those that were counted so far
    if new == old and (steps := position(now) - position(before)) >= 0:
        return steps
    over = any(bar.finished for bar in before[:-1])
    left = 0.0 if over else max(0.0, (before[-1].total or 0) - before[-1].step)
    return left + now[-1].step


def _totals(bars: tuple[Progress, ...]) -> list[float | None]:
    return [bar.total for bar in bars]


def position(bars: tuple[Progress, ...]) -> float:
    """Return one number for the position in nested loops: the steps of the innermost one since the beginning."""
    at = 0.0
    for bar in bars:
        at = at * (bar.total or 0) + bar.step
    return at
