"""Tables as text and as HTML, for all of this package. Kernel side; pure functions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import zip_longest

from jupyter_distrib.kernel.views import markup

WIDE_CHARACTERS = 24
"""Minimum length at which a cell of HTML is broken into lines if the page is too narrow for the table."""
_STYLE = "text-align:left"
_NARROW_STYLE = "text-align:left;white-space:nowrap"

_NUMBER_STYLE = "text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums"
_NUMBER = re.compile(r"(peak )?-?\d[\d,.]*(e[-+]?\d+)?( ?(%|s|min|h|[kMGT]?B|bytes|%? ?(busy|CPU)))?")

Row = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTable:
    """A table: rows of texts below the names of their columns. A text may have several lines."""

    head: Row = ()
    """The names of the columns; empty for a table without them."""
    rows: Sequence[Row] = ()

    def without_empty(self, *columns: str) -> TextTable:
        """Return the table without the empty columns among `columns`; without any empty column, if none is named."""
        left_out = {
            place
            for place, name in enumerate(self.head)
            if (not columns or name in columns) and not any(row[place] for row in self.rows)
        }

        def filled(row: Row) -> Row:
            return tuple(text for place, text in enumerate(row) if place not in left_out)

        return TextTable(head=filled(self.head), rows=[filled(row) for row in self.rows])

    def _numbers(self) -> set[int]:
        """Return the positions of the columns that contain only numbers, which are aligned to the right."""
        columns = enumerate(zip(*self.rows, strict=True))
        filled = ((place, [text for text in column if text]) for place, column in columns)
        return {place for place, texts in filled if texts and all(_NUMBER.fullmatch(text) for text in texts)}

    def as_text(self) -> str:
        """Return the table with aligned columns."""
        cells = [[text.split("\n") for text in row] for row in ((self.head, *self.rows) if self.head else self.rows)]
        widths = [max(max(map(len, lines)) for lines in column) for column in zip(*cells, strict=True)]
        aligned = [str.rjust if place in self._numbers() else str.ljust for place in range(len(widths))]
        return "\n".join(
            "  ".join(align(text, width) for align, text, width in zip(aligned, line, widths, strict=True)).rstrip()
            for row in cells
            for line in zip_longest(*row, fillvalue="")
        )

    def as_html(self) -> str:
        """Return the table as HTML that needs no style sheet."""
        # Not th, thead, tbody or br: nbconvert --sanitize-html shows them as text.
        numbers = self._numbers()
        sides = [_NUMBER_STYLE if place in numbers else _NARROW_STYLE for place in range(len(self.head))]
        head = "".join(
            f'<td style="{style}"><b>{escape(name)}</b></td>' for style, name in zip(sides, self.head, strict=True)
        )
        body = "".join(
            "<tr>" + "".join(_cell(text, number=place in numbers) for place, text in enumerate(row)) + "</tr>"
            for row in self.rows
        )
        return markup.inert(f"<table>{f'<tr>{head}</tr>' if head else ''}{body}</table>")


def _cell(text: str, *, number: bool) -> str:
    style = _NUMBER_STYLE if number else _NARROW_STYLE if len(text) < WIDE_CHARACTERS else _STYLE
    lines = [escape(line) for line in text.split("\n")]
    inside = lines[0] if len(lines) == 1 else "".join(f"<div>{line}</div>" for line in lines)
    return f'<td style="{style}">{inside}</td>'
