"""The shares of training time as text, as a picture, and as part of the widget's state. Kernel side; pure functions of
a `RunRecord`.

    time: forward 41% · backward 35% · waiting 12% · moving 6% · optimizer 4% · rest 2%

The picture is one stacked bar for each rank, an SVG as in `chart.py`. The live view draws its bars itself
(`static/strips.js`).
"""

from __future__ import annotations

import base64
from html import escape
from typing import Any

from jupyter_distrib.kernel.analysis.shares import PARTS, Shares, percents
from jupyter_distrib.kernel.record.record import RunRecord

MOST_BARS = 16
"""Maximum number of ranks to draw; if there are more, the ranks that wait most and least are drawn."""
COLORS = dict(zip(PARTS, ("#c2569b", "#3f83c4", "#2f9494", "#8f74c9", "#c78a1e", "#d4553f", "#8a8a8a"), strict=True))
"""Colour of each part; readable on white and on black."""
TEXT = "#808080"
WIDTH, ROW, BAR, LEFT = 620, 20, 14, 60
LEGEND_WIDTH = 80


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


def picture(record: RunRecord) -> str:
    """Return an `<img>` with one bar for each rank, and a legend; empty for a run that has hardly trained."""
    shares = Shares.of(record)
    if not shares.is_meaningful:
        return ""
    ranks = drawn_ranks(shares)
    height = ROW * (len(ranks) + 1)
    parts = [_bar(ROW * place, rank, shares) for place, rank in enumerate(ranks)]
    parts += [_key(ROW * len(ranks), place, name) for place, name in enumerate(PARTS)]
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="system-ui,sans-serif" font-size="11">{"".join(parts)}</svg>'
    )
    alt = "; ".join(f"rank {rank}: {percents(shares[rank])}" for rank in ranks)
    data = base64.b64encode(svg.encode()).decode()
    return f'<img alt="{escape(alt)}" width="{WIDTH}" height="{height}" src="data:image/svg+xml;base64,{data}">'


def _bar(top: int, rank: int, shares: Shares) -> str:
    at, parts = float(LEFT), [f'<text x="0" y="{top + 12}" fill="{TEXT}">rank {rank}</text>']
    for name, share in shares[rank].items():
        width = share * (WIDTH - LEFT)
        title = f"<title>{name} {share:.1%}</title>"
        parts.append(
            f'<rect x="{at:.1f}" y="{top + 1}" width="{width:.1f}" height="{BAR}" fill="{COLORS[name]}">{title}</rect>'
        )
        at += width
    return "".join(parts)


def _key(top: int, place: int, name: str) -> str:
    left = LEFT + LEGEND_WIDTH * place
    square = f'<rect x="{left}" y="{top + 4}" width="9" height="9" fill="{COLORS[name]}"/>'
    return f'{square}<text x="{left + 13}" y="{top + 12}" fill="{TEXT}">{name}</text>'
