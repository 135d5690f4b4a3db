"""The progress of a rank's nested loops, outermost first, after one of them has moved on. Kernel side; pure."""

from __future__ import annotations

from jupyter_distrib.kernel.record.terminal_stream import Progress
from jupyter_distrib.wire.messages import Progressed

NESTED_BARS = 3
"""The number of nested loops that are kept: the innermost ones."""


def moved_on(bars: tuple[Progress, ...], event: Progressed) -> tuple[Progress, ...]:
    """Put a loop's new progress in its place and drop the loops inside it."""
    index = next((i for i, old in enumerate(bars) if old.label == event.label), None)
    if index is None:
        outer, rate = tuple(old for old in bars if not old.finished), None
    else:
        # An outer loop moves on only when the loops inside it are over, so those are dropped.
        outer, rate = bars[:index], _smoothed_rate(bars[index], event)
    new = Progress(label=event.label, step=event.step, total=event.total, rate=rate, at_s=event.at_s)
    return (*outer, new)[-NESTED_BARS:]


def _smoothed_rate(old: Progress, event: Progressed) -> float | None:
    seconds, steps = event.at_s - old.at_s, event.step - old.step
    if steps < 0:  # the loop was begun again
        return None
    if seconds <= 0:
        return old.rate
    return steps / seconds if old.rate is None else 0.7 * old.rate + 0.3 * steps / seconds


def drawn(bars: tuple[Progress, ...], depth: int | None, bar: Progress | None) -> tuple[Progress, ...]:
    """Put tqdm's bar at its depth and drop the bars below it; `bar` None clears, `depth` None means unknown so far."""
    if depth is None:
        same = (i for i, old in enumerate(bars) if bar and (old.label, old.total) == (bar.label, bar.total))
        depth = next(same, 0)
    return (bars[:depth] + ((bar,) if bar else ()))[-NESTED_BARS:]


def position(bars: tuple[Progress, ...]) -> float:
    """Return one number for nested loops: the steps of the innermost one since the beginning."""
    at = 0.0
    for bar in bars:
        at = at * (bar.total or 0) + bar.step
    return at
