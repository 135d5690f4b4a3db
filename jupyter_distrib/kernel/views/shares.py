"""The shares of training time as text, as a picture, and as part of the widget's state. Kernel side; pure functions of
a `RunRecord`.

    time: forward 41% · backward 35% · waiting 12% · moving 6% · optimizer 4% · rest 2%

The picture is one stacked bar for each rank. The live view draws its bars itself
(`static/strips.js`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jupyter_distrib.kernel.analysis.shares import PARTS, Shares, percents
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.kernel.views.drawing import Drawing
from jupyter_distrib.kernel.views.png import Mark, Text, block

MOST_BARS = 16
"""Maximum number of ranks to draw; if there are more, the ranks that wait most and least are drawn."""
COLORS = dict(zip(PARTS, ("#c2569b", "#3f83c4", "#2f9494", "#8f74c9", "#c78a1e", "#d4553f", "#8a8a8a"), strict=True))
"""Colour of each part; readable on white and on black."""
WIDTH, ROW, BAR, LEFT = 688, 18, 13, 60
LEGEND_WIDTH = 90


def lines(record: RunRecord) -> list[str]:
    """Return the line of text on how time was spent; empty for a run that has hardly trained."""
    shares = Shares.of(record)
    return [f"time: {percents(shares.mean())}"] if shares.is_meaningful else []


def state(record: RunRecord) -> dict[str, Any]:
    """Return the shares in the widget's form: for each rank its number and the share of each part in thousandths. Empty
    for a run that has hardly trained."""
    shares = Shares.of(record)
    if not shares.is_meaningful:
        return {}
    ranks = [[rank, [round(1000 * share) for share in shares[rank].values()]] for rank in drawn_ranks(shares)]
    return {"shares": {"colors": COLORS, "ranks": ranks}}


def drawn_ranks(shares: Shares) -> list[int]:
    """Return the ranks whose bars are drawn, by number."""
    if len(shares) <= MOST_BARS:
        return list(shares)
    by_waiting = sorted(shares, key=lambda rank: shares.seconds[rank]["waiting"])
    return sorted([*by_waiting[: MOST_BARS // 2], *by_waiting[-MOST_BARS // 2 :]])


def picture(record: RunRecord) -> Drawing | None:
    """Return one bar for each rank, and a legend; None for a run that has hardly trained."""
    shares = Shares.of(record)
    if not shares.is_meaningful:
        return None
    ranks = drawn_ranks(shares)
    marks = [mark for place, rank in enumerate(ranks) for mark in _bar(ROW * place, rank, shares)]
    marks += [mark for place, name in enumerate(PARTS) for mark in _key(ROW * len(ranks), place, name)]
    told = (
        f"Where the time of the training goes: {'; '.join(f'rank {rank}: {percents(shares[rank])}' for rank in ranks)}"
    )
    return Drawing(names=(), width=WIDTH, height=ROW * (len(ranks) + 1), marks=tuple(marks), left_out=0, told=(told,))


def _bar(top: int, rank: int, shares: Shares) -> Iterator[Mark]:
    yield Text(0, top + 12, f"rank {rank}")
    at = float(LEFT)
    for name, share in shares[rank].items():
        width = share * (WIDTH - LEFT)
        if width >= 1:
            yield block(at, top + 1, width, BAR, COLORS[name])
        at += width


def _key(top: int, place: int, name: str) -> Iterator[Mark]:
    left = LEFT + LEGEND_WIDTH * place
    yield block(left, top + 4, 9, 9, COLORS[name])
    yield Text(left + 13, top + 12, name)
