"""A picture of a run for a saved notebook: what is drawn, its size, and what it says in words. Kernel side; pure.

Pictures are PNGs: hosting sites take images out of HTML, and `nbconvert --sanitize-html` shows their markup as text.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from jupyter_distrib.kernel.views import png
from jupyter_distrib.kernel.views.png import Mark
from jupyter_distrib.system.formatting import short

SHOWN = 1.3
"""The size of a picture in a page, in its own units: its pixels are finer than those of most pages, so that two charts
fill the width of a notebook without a larger file."""
GAP = 12
"""Height between pictures that are put together."""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """Charts in a grid."""

    names: tuple[str, ...]
    width: int
    height: int
    marks: tuple[Mark, ...]
    left_out: int
    """Number of metrics that have no chart here."""
    lines: Mapping[str, Sequence[Point]] = field(default_factory=dict)
    """The points of each chart's first highlighted line."""
    sentences: tuple[str, ...] = ()
    """One sentence on each chart."""

    @property
    def title(self) -> str:
        return f"{', '.join(short(name) for name in self.names)} over steps"

    @property
    def alt(self) -> str:
        """The numbers of all charts in words."""
        return ". ".join(self.sentences)

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in a page."""
        return round(SHOWN * self.width), round(SHOWN * self.height)

    def as_png(self) -> str:
        """Return the picture, as base64."""
        return base64.b64encode(png.drawn(self.marks, self.width, self.height)).decode()

    def as_html(self) -> str:
        """Return the picture as an `<img>` with embedded data, and the number of metrics that are not drawn."""
        width, height = self.size
        size = f'width="{width}" height="{height}"'
        return f'<img alt="{escape(self.alt)}" {size} src="data:image/png;base64,{self.as_png()}">{self.remark}'

    @property
    def remark(self) -> str:
        """The number of metrics that are not drawn, as HTML."""
        left = self.left_out
        return f"<div>{left} more metric{'s' * (left != 1)} not drawn here</div>" if left else ""


def together(drawings: Sequence[Drawing | None]) -> Drawing | None:
    """Return pictures below one another as one; None if there is none."""
    found = [drawing for drawing in drawings if drawing is not None]
    if len(found) < 2:
        return found[0] if found else None
    marks: list[Mark] = []
    top = 0
    for drawing in found:
        marks += [mark.moved(0, top) for mark in drawing.marks]
        top += drawing.height + GAP
    return Drawing(
        names=tuple(name for drawing in found for name in drawing.names),
        width=max(drawing.width for drawing in found),
        height=top - GAP,
        marks=tuple(marks),
        left_out=sum(drawing.left_out for drawing in found),
        lines={title: points for drawing in found for title, points in drawing.lines.items()},
        sentences=tuple(text for drawing in found for text in drawing.sentences),
    )
