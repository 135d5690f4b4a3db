"""The shares of training time as a picture: one stacked bar for each rank. Kernel side; pure functions of a
`RunRecord`."""

from __future__ import annotations

from collections.abc import Iterator

from jupyter_distrib.kernel.analysis.shares import PARTS, Shares, percents
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.kernel.views.drawing import Drawing
from jupyter_distrib.kernel.views.png import Mark, Text, block
from jupyter_distrib.kernel.views.shares import COLORS, drawn_ranks

WIDTH, ROW, BAR, LEFT = 688, 18, 13, 60
LEGEND_WIDTH = 90


def picture(record: RunRecord) -> Drawing | None:
    """Return one bar for each rank, and a legend; None for a run that has hardly trained."""
    shares = Shares.of(record)
    if not shares.is_meaningful:
        return None
    ranks = drawn_ranks(shares)
    marks = [mark for place, rank in enumerate(ranks) for mark in _bar(ROW * place, rank, shares)]
    marks += [mark for place, name in enumerate(PARTS) for mark in _key(ROW * len(ranks), place, name)]
    sentence = (
        f"Where the time of the training goes: {'; '.join(f'rank {rank}: {percents(shares[rank])}' for rank in ranks)}"
    )
    return Drawing(
        names=(), width=WIDTH, height=ROW * (len(ranks) + 1), marks=tuple(marks), left_out=0, sentences=(sentence,)
    )


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
