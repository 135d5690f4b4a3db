"""The view of a run as static HTML, for a saved notebook, years later. Kernel side; pure functions of a `RunRecord`.

No script and no style tag, since front ends and hosting sites take them out, and of our own only tags that nbconvert
keeps with `--sanitize-html`: it shows other tags as text. All text that ranks wrote is escaped; a display becomes an
image that carries its data, harmless markup (`kernel/views/sanitize_html.py`) or text."""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Iterator, Sequence
from html import escape

from jupyter_distrib.kernel.record.displays import Display
from jupyter_distrib.kernel.record.rank_record import RankRecord
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.kernel.record.terminal_stream import css, visible
from jupyter_distrib.kernel.views import chart, markup, share_bars, timeline
from jupyter_distrib.kernel.views import text as text_view
from jupyter_distrib.kernel.views.drawing import Drawing, together
from jupyter_distrib.kernel.views.table import TextTable
from jupyter_distrib.system.formatting import clipped

DISPLAY_BYTES = 8_000_000
"""Limit on the size of all displays together; a larger notebook is slow to open."""
DISPLAYS_S = 15.0
"""Limit on the processor time for all HTML displays together; tables of 8 MB take about 3 s, and what a hostile library
displays may take hours."""
TEXT_CHARACTERS = 10_000
LONG_OUTPUT = 40
"""Number of lines above which output scrolls in a box of its own."""
_MONOSPACE = "font-family:var(--jp-code-font-family, monospace)"
"""The style of text in columns, needed since nbconvert's output has no monospace font for it."""
_DRAWN_BAR = re.compile(" [▓░]+")
"""A bar of block characters, which is ragged in a proportional font."""
_RUN_FILE = re.compile(r"\b(runs/[\w.-]+/(?:trace\.json\.gz|memory-rank\d+\.pickle))")
"""A file that belongs to a run, beside the notebook."""
_ADDRESS = re.compile(r"""(https?://[^\s<>"']*[^\s<>"'.,;:!?)])""")
"""The address of a page, without the punctuation of the sentence around it; `addressed` in `static/state.js` uses the
same."""


def as_html(
    record: RunRecord,
    elapsed_s: float,
    pool: str = "",
    *,
    always: bool = False,
    output: Sequence[text_view.OutputLine] | None = None,
    with_chart: bool = True,
) -> str:
    """Return the view of `text.as_text` as HTML, with the displays. `with_chart` is False where the picture of an ended
    run is an output of its own; else it is an image in the page."""
    if not always and not text_view.is_worth_showing(record, elapsed_s):
        return ""
    parts = [f"<div><b>{escape(text_view.header(record, elapsed_s, pool))}</b></div>"]
    parts += [f"<div>{_linked(note)}</div>" for note in text_view.remarks(record)]
    if rows := text_view.statuses(record, elapsed_s):
        parts.append(_table(rows))
    if drawing := picture_of(record):
        parts.append(f"<div>{drawing.as_html()}</div>" if with_chart else drawing.remark)
    if lines := text_view.output_lines(record) if output is None else output:
        parts.append(_output(lines))
    parts += _displays(record)
    return markup.inert(visible(f"<div>{''.join(parts)}</div>"))


def picture_of(record: RunRecord) -> Drawing | None:
    """Return the charts of an ended run, where the time of the training went, and which ranks were behind."""
    charts = chart.chart_of(record) if record.ended else None
    return together([charts, share_bars.picture(record), timeline.picture(record)])


def _linked(note: str) -> str:
    """Return a note as HTML, with links to pages and downloads of the run's files."""
    link = '<a href="{0}" target="_blank" rel="noopener noreferrer">{0}</a>'
    parts = map(escape, _ADDRESS.split(note))
    return "".join(
        link.format(part) if place % 2 else _RUN_FILE.sub(r'<a href="\1" download>\1</a>', part)
        for place, part in enumerate(parts)
    )


def _table(rows: Sequence[text_view.Row]) -> str:
    plain = [tuple(_DRAWN_BAR.sub("", text) for text in row) for row in rows]
    return TextTable(head=text_view.COLUMNS, rows=plain).without_empty().as_html()


def _output(lines: Sequence[text_view.OutputLine]) -> str:
    box = "" if len(lines) <= LONG_OUTPUT else ";max-height:40em;overflow:auto"
    return f'<pre style="{_MONOSPACE}{box}">{chr(10).join(map(_coloured, lines))}</pre>'


def _coloured(line: text_view.OutputLine) -> str:
    """Return a line as HTML; text added by clipping has no colour."""
    parts, at = [escape(line.head)], 0
    for start, end, style in line.spans:
        text = line.text[start:end]
        parts += [escape(line.text[at:start]), f'<span style="{css(style)}">{escape(text)}</span>' if text else ""]
        at = max(at, end)
    return "".join([*parts, escape(line.text[at:])])


# ---------------------------------------------------------------------------------------------------- displays


def _displays(record: RunRecord) -> Iterator[str]:
    left, end_s = DISPLAY_BYTES, time.thread_time() + DISPLAYS_S
    for rank in record.ranks.values():
        shown = []
        for display in reversed(rank.displays.shown):  # the newest are the last to be left out
            if display.size_bytes <= left:
                left -= display.size_bytes
                left_s = end_s - time.thread_time()
                shown.append(f"<div>{display_html(display, f'rank {rank.rank}', left_s)}</div>")
        if rank.displays.shown:
            body = _missing(rank, shown) + "".join(reversed(shown))
            yield f"<div><b>rank {rank.rank}</b></div>{body}"


def _missing(rank: RankRecord, shown: Sequence[str]) -> str:
    count = rank.displays.skipped + len(rank.displays.shown) - len(shown)
    return f"<div>... {count:,} earlier display{'s' * (count != 1)} not kept here</div>" if count else ""


def display_html(display: Display, alt: str, most_s: float) -> str:
    """Return the richest representation of a display that is harmless in every front end; of HTML as much as can be
    checked in the given seconds of the processor."""
    from jupyter_distrib.kernel.views import sanitize_html  # a parser of HTML and CSS, which most runs never need

    data = markup.with_html(display.data)
    for kind in sanitize_html.IMAGES:
        if kind in data and sanitize_html.is_base64(data[kind]):
            return _image(kind, "".join(data[kind].split()), alt)
    if "image/svg+xml" in data:
        return _image("image/svg+xml", base64.b64encode(data["image/svg+xml"].encode()).decode(), alt)
    if "text/html" in data and (harmless := sanitize_html.safe(data["text/html"], most_s)).strip():
        return harmless
    if (latex := data.get("text/latex")) is not None:
        return f"<div>{escape(clipped(latex, TEXT_CHARACTERS))}</div>"
    return f'<pre style="{_MONOSPACE}">{escape(clipped(text_view.displayed_text(data), TEXT_CHARACTERS))}</pre>'


def _image(kind: str, data: str, alt: str) -> str:
    return f'<img alt="{escape(alt)}" src="data:{kind};base64,{data}">'
