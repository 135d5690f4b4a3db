"""The steps of inline ranks, as data and for display: the values that ranks sent to one another in each collective
and each message.

They are shown under the cell as text, and as HTML that steps forward and back without a script, and so works in a
saved notebook too: each step is a section, and a radio button selects the visible one. Where style sheets are
removed, all are visible.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from jupyter_distrib.system.formatting import rank_list

MOST_STEPS = 200
SHOWN_NUMBERS = 24
"""Larger tensors are shown by their shape and their first numbers."""
SHOWN_ROWS = 4
CHARACTERS = 30
COLOURS = ("#2f7fd1", "#d0701a", "#2c9a57", "#b14fc4", "#c8443f", "#0f8c99", "#8f7400", "#7a6cf0")
"""Colours of a rank's values, by rank number; visible on both white and black."""
LINE, PADDING, GAP = 17, 9, 8
LETTER = 7.4
LABEL, ARROWS = 56, 150
_numbers = itertools.count(1)
_OWN_KEYS = 'data-lm-suppress-shortcuts="true"'
"""The attribute that makes JupyterLab leave the arrow keys to an element."""


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor or another object as it is shown."""

    lines: tuple[str, ...]
    shape: str


@dataclass(frozen=True, slots=True)
class Arrow:
    """A value that one rank sent to another."""

    source: int
    target: int
    value: Value


@dataclass(slots=True, kw_only=True)
class Step:
    """One collective or message."""

    name: str
    detail: str
    lines: dict[int, int]
    """The line of the cell in which each rank called it."""
    before: dict[int, tuple[Value, ...]]
    after: dict[int, tuple[Value, ...]]
    arrows: list[Arrow] = field(default_factory=list)

    @property
    def title(self) -> str:
        return f"{self.name} ({self.detail})" if self.detail else self.name

    @property
    def place(self) -> str:
        lines = sorted(set(self.lines.values()) - {0})
        return f"line{'s' * (len(lines) > 1)} {', '.join(map(str, lines))}" if lines else ""

    @property
    def sentences(self) -> list[str]:
        """Sentences on who sends what to whom: one for each value that a rank sends."""
        to: dict[tuple[int, Value], list[int]] = defaultdict(list)
        for arrow in self.arrows:
            to[arrow.source, arrow.value].append(arrow.target)
        return [
            f"rank {source} sends {' '.join(value.lines)}{f' of shape {value.shape}' if value.shape else ''}"
            f" to {rank_list(targets)}"
            for (source, value), targets in to.items()
        ] or ["no data: every rank waits until all are here"]


def value_of(thing: Any) -> Value:
    """Return a tensor or object in the form in which it is shown."""
    if not hasattr(thing, "shape") or not hasattr(thing, "detach"):
        return Value((_cut(repr(thing)),), "")
    shape = str(list(thing.shape))
    numbers = thing.detach().cpu()
    if numbers.dim() == 0:
        return Value((_number(numbers.item()),), "")
    if numbers.numel() > SHOWN_NUMBERS:
        first = " ".join(_number(each) for each in numbers.flatten()[:3].tolist())
        return Value((_cut(f"[{first} …]"), f"shape {shape}"), shape)
    rows = numbers.reshape(-1, numbers.shape[-1]).tolist() if numbers.numel() else [[]]
    lines = [_cut(f"[{' '.join(_number(each) for each in row)}]") for row in rows]
    more = ["…"] if len(lines) > SHOWN_ROWS else []
    return Value((*lines[:SHOWN_ROWS], *more), shape)


def values_of(things: Sequence[Any]) -> tuple[Value, ...]:
    return tuple(value_of(each) for each in things)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _cut(text: str) -> str:
    return text if len(text) <= CHARACTERS else text[: CHARACTERS - 1] + "…"


def show(steps: Sequence[Step], ranks: Sequence[int], left_out: int) -> None:
    """Show the steps under the cell, or print them where nothing can be shown."""
    if not steps:
        return
    text = as_text(steps, left_out)
    ipython = sys.modules.get("IPython")  # loaded only where there is a notebook
    if ipython is None or getattr(ipython.get_ipython(), "kernel", None) is None:
        print(text)
    else:
        ipython.display.display({"text/html": as_html(steps, ranks, left_out), "text/plain": text}, raw=True)


def as_text(steps: Sequence[Step], left_out: int = 0) -> str:
    parts = [
        "\n".join([_heading(number, step, len(steps)), *_rows(step), *(f"  {each}" for each in step.sentences)])
        for number, step in enumerate(steps, 1)
    ]
    return "\n\n".join([*parts, *_left(left_out)])


def _heading(number: int, step: Step, count: int) -> str:
    return " · ".join(filter(None, [f"step {number} of {count}", step.title, step.place]))


def _left(left_out: int) -> list[str]:
    return [f"{left_out} further step{'s' * (left_out > 1)} not shown"] if left_out else []


def _rows(step: Step) -> Iterable[str]:
    for rank, before in step.before.items():
        after = step.after[rank]
        if before or after:
            yield f"  rank {rank}  {_joined(before)}" + (f"  ->  {_joined(after)}" if after != before else "")


def _joined(values: Iterable[Value]) -> str:
    return ", ".join(" ".join(value.lines) for value in values)


def as_html(steps: Sequence[Step], ranks: Sequence[int], left_out: int = 0) -> str:
    """Return one piece of HTML with all steps."""
    name = f"jd-steps-{os.getpid()}-{next(_numbers)}"
    radios = "".join(
        f'<input type="radio" name="{name}" id="{name}-{number}" {_OWN_KEYS} '
        f'aria-label="{escape(_heading(number, step, len(steps)))}"{" checked" if number == 1 else ""}>'
        for number, step in enumerate(steps, 1)
    )
    sections = "".join(_section(name, number, step, ranks, len(steps)) for number, step in enumerate(steps, 1))
    left = "".join(f"<div>{each}</div>" for each in _left(left_out))
    return (
        f'<div class="{name}" role="group" '
        f'aria-label="What the ranks send to one another, step by step">'
        f"<style>{_style(name, len(steps))}</style>{radios}{sections}{left}</div>"
    )


def _style(name: str, count: int) -> str:
    shown = ",".join(
        f".{name} > input:nth-of-type({number}):checked ~ section:nth-of-type({number})"
        for number in range(1, count + 1)
    )
    return (
        f".{name} {{ color: var(--jp-content-font-color1, inherit); max-width: 760px }}"
        f".{name} > input {{ margin: 2px 3px 6px; width: 16px; height: 16px }}"
        f".{name} > input {{ accent-color: var(--jp-brand-color1, #1976d2) }}"
        f".{name} > section {{ display: none }} {shown} {{ display: block }}"
        f".{name} label {{ cursor: pointer; border: 1px solid; border-radius: 4px; padding: 1px 10px }}"
        f".{name} label {{ margin-right: 6px }}"
        f".{name} label.jd-end {{ visibility: hidden }}"
        f".{name} svg {{ display: block; max-width: 100%; height: auto; margin: 8px 0 }}"
        f".{name} ul {{ margin: 0; padding-left: 1.4em }}"
    )


def _section(name: str, number: int, step: Step, ranks: Sequence[int], count: int) -> str:
    ways = "".join(
        f'<label for="{name}-{to}">{text}</label>' if 1 <= to <= count else f'<label class="jd-end">{text}</label>'
        for to, text in ((number - 1, "◀ back"), (number + 1, "forward ▶"))
    )
    sentences = "".join(f"<li>{escape(each)}</li>" for each in step.sentences)
    return (
        f'<section><div><span aria-hidden="true">{ways}</span><b>{escape(_heading(number, step, count))}</b></div>'
        f"{_picture(step, ranks)}<ul>{sentences}</ul></section>"
    )


def _picture(step: Step, ranks: Sequence[int]) -> str:
    """Draw the ranks below one another, with their values before at the left and after at the right."""
    ranks = [rank for rank in ranks if rank in step.before]
    lines = {rank: (_lines(step.before[rank]), _lines(step.after[rank])) for rank in ranks}
    widths = [
        max(60.0, LETTER * max((len(line) for each in lines.values() for line in each[side]), default=0) + 2 * PADDING)
        for side in (0, 1)
    ]
    left, right = LABEL, LABEL + widths[0] + ARROWS
    top, parts, middles = 22.0, [], {}
    parts += [_text(left, 14, "before", soft=True), _text(right, 14, "after", soft=True)]
    for rank in ranks:
        before, after = lines[rank]
        height = max(len(before), len(after), 1) * LINE + 2 * PADDING
        middles[rank] = top + height / 2
        changed = step.before[rank] != step.after[rank]
        parts.append(_text(0, middles[rank] + 4, f"rank {rank}", bold=True))
        parts += _box((left, top, widths[0], height), before, _colour(rank), bold=False)
        parts += _box((right, top, widths[1], height), after, _colour(rank), bold=changed)
        top += height + GAP
    parts += _arrows(step, middles, left + widths[0], right)
    width = right + widths[1] + 4
    said = escape(f"{step.title}: {'; '.join(step.sentences)}")
    return (
        f'<svg width="{width:.0f}" height="{top:.0f}" viewBox="0 0 {width:.0f} {top:.0f}" role="img" '
        f'aria-label="{said}" '
        f'font-family="var(--jp-code-font-family, monospace)" font-size="12">{"".join(parts)}</svg>'
    )


def _lines(values: Sequence[Value]) -> list[str]:
    """Return the lines of values below one another, those of several with their numbers."""
    if len(values) == 1:
        return [*values[0].lines, *([values[0].shape] if values[0].shape.startswith("shape") else [])]
    return [f"{place}: {' '.join(value.lines)}" for place, value in enumerate(values)]


def _box(area: tuple[float, float, float, float], lines: Sequence[str], colour: str, *, bold: bool) -> list[str]:
    x, y, width, height = area
    start = y + height / 2 - (len(lines) - 1) * LINE / 2 + 4
    frame = f'width="{width:.0f}" height="{height:.0f}" rx="4" fill="none" stroke="{colour}"'
    return [
        f'<rect x="{x:.0f}" y="{y:.0f}" {frame}/>',
        *(_text(x + PADDING, start + place * LINE, line, bold=bold) for place, line in enumerate(lines)),
    ]


def _text(x: float, y: float, text: str, *, bold: bool = False, soft: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    style = ' font-style="italic"' if soft else ""
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" fill="currentColor"{weight}{style} xml:space="preserve">{escape(text)}</text>'
    )


def _arrows(step: Step, middles: dict[int, float], left: float, right: float) -> Iterable[str]:
    """Draw the arrows in the colour of the sending rank; arrows to the same rank end below one another."""
    sources = sorted({arrow.source for arrow in step.arrows})
    for arrow in step.arrows:
        if arrow.source not in middles or arrow.target not in middles:
            continue
        shift = (sources.index(arrow.source) - (len(sources) - 1) / 2) * min(6.0, 24 / len(sources))
        (x, y), (to_x, to_y) = (left + 3, middles[arrow.source]), (right - 10, middles[arrow.target] + shift)
        colour = _colour(arrow.source)
        bend = f"C{x + 60:.0f} {y:.1f} {to_x - 60:.0f} {to_y:.1f} {to_x:.0f} {to_y:.1f}"
        yield f'<path d="M{x:.0f} {y:.1f}{bend}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
        yield f'<path d="M{to_x - 1:.0f} {to_y - 4:.1f}l8 4l-8 4z" fill="{colour}"/>'


def _colour(rank: int) -> str:
    return COLOURS[rank % len(COLOURS)]
