"""The shares of training time as text, and as part of the widget's state. Kernel side; pure functions of
a `RunRecord`.

    time: forward 41% · backward 35% · waiting 12% · moving 6% · optimizer 4% · rest 2%

`share_bars.py` draws them for the saved notebook, `static/strips.js` for the live view.
"""

from __future__ import annotations

from typing import Any

from jupyter_distrib.kernel.analysis.shares import PARTS, Shares, percents
from jupyter_distrib.kernel.record.record import RunRecord

MOST_BARS = 16
"""Maximum number of ranks to draw; if there are more, the ranks that wait most and least are drawn."""
COLORS = dict(zip(PARTS, ("#c2569b", "#3f83c4", "#2f9494", "#8f74c9", "#c78a1e", "#d4553f", "#8a8a8a"), strict=True))
"""Colour of each part; readable on white and on black."""


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
