"""The colours and weights of what ranks print: terminal codes as spans of a line. Kernel side; pure functions.

    "\\x1b[1;31mred\\x1b[0m plain"   -->   "red plain", ((0, 3, "B f1"),)

A style is words: `f1` and `b1` are the colours of the text and of its ground (0 to 15, or `#rrggbb`), `B` is bold, `I`
italic, `U` underlined. `static/output.js` reads the same words.
"""

from __future__ import annotations

import re
from itertools import chain

BEGIN, END = "\ufdd0", "\ufdd1"
"""Characters around the parameters of a code, in a line that is still being written. Unicode has them for internal
use; those of a rank are taken out beforehand."""
_MARK = re.compile(f"{BEGIN}([^{BEGIN}{END}]*)(?:{END}|$)")
_RANK_MARKS = re.compile(f"[{BEGIN}{END}]")
_WEIGHTS = {1: "B", 3: "I", 4: "U"}
_ENDS = {22: "B", 23: "I", 24: "U", 39: "f", 49: "b"}
_LEVELS = (0, 95, 135, 175, 215, 255)
PALETTE = (
    "#6e6e6e", "#c62f33", "#2c7f3f", "#8f6500", "#2c6fd1", "#a047b5", "#0c7c8a", "#757575",
    "#7a7a7a", "#d5393d", "#2f8544", "#986c00", "#3676d6", "#aa4fc0", "#0f8291", "#8a8a8a",
)  # fmt: skip
"""The sixteen colours of a terminal, of a lightness that can be read on white and on black."""

Span = tuple[int, int, str]
"""A part of a line: its beginning, its end, and its style."""


class StyledText(str):
    """A text without codes that knows the spans of its colours."""

    spans: tuple[Span, ...] = ()


def without_marks(text: str) -> str:
    """Return the text of a rank without the characters that are marks here."""
    return _RANK_MARKS.sub("\ufffd", text)


def marked(parameters: str) -> str:
    """Return the mark of a code with these parameters."""
    return f"{BEGIN}{parameters}{END}"


def marks(text: str) -> str:
    """Return the marks of a text, without the text."""
    return "".join(found[0] for found in _MARK.finditer(text))


def plain(text: str) -> str:
    return _MARK.sub("", text) if BEGIN in text else text


def styled(text: str, style: str) -> tuple[StyledText, str]:
    """Return a text without its marks and with its spans, and the style that holds behind it; `style` holds at its
    beginning."""
    spans: list[Span] = []
    parts: list[str] = []
    length = 0
    for index, part in enumerate(_MARK.split(text)):
        if index % 2:
            style = _after(style, part)
        elif part:
            if style:
                spans.append((length, length + len(part), style))
            parts.append(part)
            length += len(part)
    result = StyledText("".join(parts))
    result.spans = tuple(spans)
    return result, style


def _after(style: str, parameters: str) -> str:
    """Return the style that a code makes of the present one."""
    words = {word[0]: word for word in style.split()}
    numbers = [int(number) if number.isdigit() else 0 for number in re.split("[;:]", parameters)]
    while numbers:
        number = numbers.pop(0)
        if number == 0:
            words.clear()
        elif number in _WEIGHTS:
            words[_WEIGHTS[number]] = _WEIGHTS[number]
        elif number in _ENDS:
            words.pop(_ENDS[number], None)
        elif number in (38, 48):
            colour = _chosen(numbers)
            words |= {"fb"[number == 48]: f"{'fb'[number == 48]}{colour}"} if colour else {}
        else:
            words |= _basic(number)
    return " ".join(words[key] for key in sorted(words))


def _basic(number: int) -> dict[str, str]:
    for first, key, offset in ((30, "f", 0), (40, "b", 0), (90, "f", 8), (100, "b", 8)):
        if first <= number < first + 8:
            return {key: f"{key}{number - first + offset}"}
    return {}


def _chosen(numbers: list[int]) -> str:
    """Take the parameters of a colour by number or by its parts; empty if they are none."""
    kind = numbers.pop(0) if numbers else 0
    if kind == 5 and numbers:
        number = min(255, numbers.pop(0))
        return str(number) if number < 16 else _hex(*_of_cube(number))
    if kind == 2 and len(numbers) >= 3:
        red, green, blue = (min(255, numbers.pop(0)) for _ in range(3))
        return _hex(red, green, blue)
    return ""


def _of_cube(number: int) -> tuple[int, int, int]:
    if number >= 232:
        grey = 8 + 10 * (number - 232)
        return grey, grey, grey
    place = number - 16
    return _LEVELS[place // 36], _LEVELS[place // 6 % 6], _LEVELS[place % 6]


def _hex(red: int, green: int, blue: int) -> str:
    return f"#{red:02x}{green:02x}{blue:02x}"


def css(style: str) -> str:
    """Return the style as declarations of CSS that need no style sheet."""
    words = {word[0]: word[1:] for word in style.split()}
    names = {"f": "color", "b": "background-color"}
    if "b" in words and "f" not in words:
        words["f"] = "#ffffff" if not words["b"].startswith("#") else ""
    colours = (f"{names[key]}:{_colour(words[key])}" for key in "fb" if words.get(key))
    weights = {"B": "font-weight:bold", "I": "font-style:italic", "U": "text-decoration:underline"}
    return ";".join(chain(colours, (weights[key] for key in "BIU" if key in words)))


def _colour(word: str) -> str:
    return word if word.startswith("#") else PALETTE[int(word)]
