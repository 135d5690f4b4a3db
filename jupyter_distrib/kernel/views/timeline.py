"""The course of a run as a part of the widget's state, and as a picture. Kernel side; pure functions of a `RunRecord`.

The picture has a row for each rank and time from left to right, coloured by the steps that the rank was behind the
front one. The live view draws it itself (`static/strips.js`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from jupyter_distrib.kernel.record import timeline
from jupyter_distrib.kernel.record.over_time import OverTime, over_time
from jupyter_distrib.kernel.record.rank_record import RankRecord
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.kernel.record.timeline import NONE, Levels, Use
from jupyter_distrib.kernel.views.drawing import Drawing
from jupyter_distrib.kernel.views.png import Mark, Text, block
from jupyter_distrib.system.formatting import duration
from jupyter_distrib.wire import messages as m

COLORS = ("#5b8db8", "#7fa3a8", "#a8a468", "#d6a84e", "#e08a3c", "#dd6b38", "#d04a3a", "#b5323f", "#a83c74", "#8f4fa3")
"""Colour of each level: blue for a leading rank, purple for one far behind."""
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
WIDTH, LEFT, LEGEND = 688, 60, 38
TALL, SMALL, TALL_UNTIL = 14, 5, 16
"""Height of a row for up to this many ranks, and for more ranks."""


def levels(record: RunRecord) -> Levels | None:
    """Return how far the ranks were behind over time; None if unknown."""
    ranks = record.ranks.values()
    ended_s = {rank.rank: rank.ended_at_s for rank in ranks if rank.ended_at_s is not None}
    loops = {bool(rank.course.bars) for rank in ranks if rank.course.places}
    return timeline.levels({rank.rank: rank.course.places for rank in ranks}, ended_s) if len(loops) == 1 else None


def ranks_over_time(record: RunRecord) -> OverTime | None:
    """Return what each rank did over the run; None if unknown."""
    ranks = record.ranks.values()
    return over_time(
        {rank.rank: rank.course for rank in ranks},
        {rank.rank: rank.ended_at_s for rank in ranks if rank.ended_at_s is not None},
        gpus=record.gpus,
        memory_bytes=max((rank.gpu_memory_total_bytes or 0 for rank in ranks), default=0) or None,
    )


def state(record: RunRecord) -> dict[str, Any] | None:
    """Return what the ranks did over the run in the widget's form; None if there is nothing to see: with few ranks of
    which none is behind, the rows and strips show everything."""
    if len(record.ranks) <= TALL_UNTIL and ((found := levels(record)) is None or not found.show_delay):
        return None
    return as_state(ranks_over_time(record))


def as_state(found: OverTime | None) -> dict[str, Any] | None:
    """Return the same in the form that pages draw."""
    return None if found is None else {**m.fields_of(found), "colors": list(COLORS)}


def strips(rank: RankRecord) -> list[str]:
    """Return the usage and memory of the last seconds, as texts with one digit (`DIGITS`) for each second."""
    uses: list[Use] = rank.course.uses
    most = max((use.percent for use in uses), default=0.0)
    memory = rank.gpu_memory_total_bytes or max((use.memory_bytes for use in uses), default=0)
    return [
        _digits([use.percent for use in uses], max(100.0, most)),
        _digits([use.memory_bytes for use in uses], memory),
    ]


def _digits(values: Sequence[float], most: float) -> str:
    top = len(DIGITS) - 1
    return "".join(DIGITS[min(top, max(0, round(top * value / (most or 1))))] for value in values)


def picture(record: RunRecord) -> Drawing | None:
    """Return the timeline; None if no rank fell behind or this is unknown."""
    found = levels(record)
    if found is None or not found.show_delay:
        return None
    row = TALL if len(found.rows) <= TALL_UNTIL else SMALL
    height = row * len(found.rows) + LEGEND
    marks = [mark for place, each in enumerate(found.rows.items()) for mark in _row(place, *each, row)]
    marks += _legend(found, row * len(found.rows))
    caption = f"Steps behind the leading rank over {duration(found.seconds)}: {spoken(found)}"
    return Drawing(names=(), width=WIDTH, height=height, marks=tuple(marks), left_out=0, sentences=(caption,))


def spoken(found: Levels) -> str:
    """Return the ranks that were behind, each with the maximum number of steps."""
    worst = {rank: max((int(level) for level in row if level != NONE), default=0) for rank, row in found.rows.items()}
    late = sorted((rank for rank, level in worst.items() if level > 1), key=lambda rank: (-worst[rank], rank))
    return "; ".join(f"rank {rank} up to {steps_of(worst[rank])}" for rank in late[:8])


def steps_of(level: int) -> str:
    """Return the range of steps of a level: `4-7`."""
    low, high = 1 << (level - 1) if level else 0, (1 << level) - 1
    return f"{low} and more" if level == timeline.LEVELS else f"{low}-{high}" if high > low else str(low)


def _row(place: int, rank: int, row: str, height: int) -> Iterator[Mark]:
    top, at, width = place * height, float(LEFT), (WIDTH - LEFT) / len(row)
    if height == TALL or place % 8 == 0:
        yield Text(0, top + 10, f"rank {rank}")
    for level, group in groupby(row):
        length = width * len(list(group))
        if level != NONE:
            yield block(at, top, length, height - 1, COLORS[int(level)])
        at += length


def _legend(found: Levels, top: int) -> Iterator[Mark]:
    at = LEFT
    for level in sorted(set("".join(found.rows.values())) - {NONE}):
        text = steps_of(int(level))
        yield block(at, top + 7, 9, 9, COLORS[int(level)])
        yield Text(at + 13, top + 15, text)
        at += 28 + 7 * len(text)
    yield Text(LEFT, top + 32, f"steps behind, over {duration(found.seconds)}")
