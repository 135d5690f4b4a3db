"""The output of a rank as lines and as tqdm's bars. Kernel side; no thread, no clock, standard library only.

    Stream.feed(text)   joins pieces, folds \\r and terminal codes  -->  complete lines, with their colours
                                                                   -->  bars, drawn at a depth or cleared
                                                                   -->  the clearing that came before them

Memory is bounded for any text: a line is cut at `LINE_CHARACTERS`. Codes of colours and weights become spans:

    "\\x1b[1;31mred\\x1b[0m plain"   -->   "red plain", ((0, 3, "B f1"),)

A style is words: `f1` and `b1` are the colours of the text and of its ground (0 to 15, or `#rrggbb`), `B` is bold, `I`
italic, `U` underlined. `static/output.js` reads the same words.
"""

from __future__ import annotations

import re
from dataclasses import asdict
from itertools import chain
from typing import NamedTuple, TextIO

from jupyter_distrib.libraries import tqdm
from jupyter_distrib.system.data_class import data_class
from jupyter_distrib.system.terminal_line import is_terminal

LINE_CHARACTERS = 4000
"""The length at which a line is cut, with a note on the rest: a line may be 100 MB long."""
_UP = "\x1b"
"""The character that stands for one cursor move up after terminal codes are removed; no other escape is left."""
_CODE = re.compile(r"\x1b(?:\[([0-9;:?<=>!]*)([ -/]*[@-~])|[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[ -/]*[0-~])?")
_DIGITS = 9
"""Maximum number of digits to read, since Python refuses to read thousands, and a rank may print anything."""
_UNFINISHED_CODE = re.compile(r"\x1b(?:\[[0-9;:?<=>!]*[ -/]*|[\]PX^_][^\x07\x1b\n]*\x1b?|[ -/]*)\Z")
_CLEAR = re.compile(r"\x1b\]distrib-clear;(\d{1,9})(;wait)?\x07")
"""The code by which a rank's `clear_output` marks its place among what is printed (`worker/output/displaying.py`)."""
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f]")
_CONTROL_IN_LINE = re.compile(_CONTROL.pattern.replace("\\x08", "\\x07"))
"""The same code without the backspace, which moves the cursor."""
_CONTROL_OF_TEXT = re.compile(r"[\x00-\x07\x0b\x0c\x0e-\x1f\x7f-\x9f]")
"""Control characters that a terminal does not need to show a text and its bars."""
_COLOURS = re.compile(r"(\x1b\[[0-9;:]*m)")
BEGIN, END = "\ufdd0", "\ufdd1"
"""Characters around the parameters of a code in an unfinished line. Unicode has them for internal use; they are removed
beforehand from the ranks' own text."""
_MARK = re.compile(f"{BEGIN}([^{BEGIN}{END}]*)(?:{END}|$)")
_RANK_MARKS = re.compile(f"[{BEGIN}{END}]")
_WEIGHTS = {1: "B", 3: "I", 4: "U"}
_ENDS = {22: "B", 23: "I", 24: "U", 39: "f", 49: "b"}
_LEVELS = (0, 95, 135, 175, 215, 255)
_PALETTE = (
    "#6e6e6e", "#c62f33", "#2c7f3f", "#8f6500", "#2c6fd1", "#a047b5", "#0c7c8a", "#757575",
    "#7a7a7a", "#d5393d", "#2f8544", "#986c00", "#3676d6", "#aa4fc0", "#0f8291", "#8a8a8a",
)  # fmt: skip
"""The sixteen colours of a terminal, at a lightness that is readable on white and on black."""
Span = tuple[int, int, str]
"""Part of a line: start, end, and style."""


@data_class
class Progress:
    """The progress of one loop of one rank."""

    label: str
    step: float
    total: float | None
    rate: float | None = None
    """The number of steps per second; None while unknown."""
    unit: str = "it"
    detail: str = ""
    """tqdm's postfix: `loss=0.3`."""
    at_s: float = 0.0

    @property
    def finished(self) -> bool:
        return self.total is not None and self.step >= self.total


Draw = tuple[int | None, Progress | None]


class Fed(NamedTuple):
    """The result of feeding a piece of output."""

    lines: list[str]
    """Complete lines; `StyledText` if they have colours."""
    bars: list[Draw]
    cleared: int
    """The number of the `clear_output` after which these lines came; 0 if there was none."""


class Stream:
    """A parser that makes lines from a rank's stdout or stderr, which arrives in pieces that end at any character."""

    __slots__ = (
        "_back",
        "_clear",
        "_cleared",
        "_code",
        "_cut",
        "_line",
        "_on_bar",
        "_over",
        "_redrawn",
        "_style",
        "_styled",
    )

    def __init__(self, cleared: int = 0) -> None:
        self._cleared = cleared
        """The number of the last `clear_output` that has taken effect in any stream of the rank."""
        self._clear = 0
        """The number of a `clear_output(wait=True)` that waits for more text; 0 if none does."""
        self._line = ""
        self._cut = 0
        """Number of characters of the current line beyond `LINE_CHARACTERS`."""
        self._back = 0
        """Number of characters by which backspaces have moved the cursor left of the end of the line."""
        self._over = False
        """Whether a carriage return came: the next character starts the line anew, unless it is the newline of
        `\\r\\n`."""
        self._redrawn = False
        """Whether a carriage return started the current text."""
        self._on_bar = False
        """Whether the cursor was moved up onto a bar, so that a newline only steps down again."""
        self._code = ""
        self._styled = False
        """Whether a colour code has come."""
        self._style = ""
        """The style at the beginning of the current line; the head of this file describes styles."""

    def feed(self, text: str) -> Fed:
        """Parse a piece of text. Return the lines that it completes, and the changes to tqdm's bars."""
        lines: list[str] = []
        bars: list[Draw] = []
        text, self._code = self._code + text, ""
        cleared = 0
        if self._clear or (_UP in text and _CLEAR.search(text)):
            text, cleared = self._after_clears(text)
        *complete, rest = self._decode(text).split("\n")
        for piece in complete:
            is_simple = len(piece) <= LINE_CHARACTERS and "\r" not in piece and _UP not in piece and "\b" not in piece
            if is_simple and not (self._line or self._over or self._on_bar):
                lines.append(self._commit(piece) if self._styled else piece)
            else:
                self._add_piece(piece, bars)
                self._newline(lines, bars)
        self._add_piece(rest, bars)
        if self._redrawn and (bar := parse_bar(plain(self._line))):
            bars.append((None, bar))
        return Fed(lines, bars, cleared)

    def clear(self, number: int) -> bool:
        """Apply a `clear_output`; return whether it clears the current text."""
        self._cleared = max(self._cleared, number)
        if not 0 < self._clear <= number:
            return False
        self._clear = 0
        self._reset()
        return True

    def _after_clears(self, text: str) -> tuple[str, int]:
        """Return the text after the last clearing that takes effect, and its number; 0 if none does."""
        first, *parts = _CLEAR.split(text)
        kept, number = "", 0
        for mark, wait, piece in [("", None, first), *zip(parts[::3], parts[1::3], parts[2::3], strict=True)]:
            if mark and (not wait or int(mark) <= self._cleared):
                kept, number, self._clear = "", int(mark), 0
            elif mark:
                self._clear = int(mark)
            if piece and self._clear:
                kept, number, self._clear = piece, self._clear, 0
            else:
                kept += piece
        if number:
            self._reset()
            self._cleared = max(self._cleared, number)
        return kept, number

    def finish(self) -> list[str]:
        """End the current line, because nothing will continue it, and return it."""
        lines: list[str] = []
        if self._line:
            self._newline(lines, [])
        return lines

    def peek(self) -> str:
        """Return the current line unless it is a bar."""
        if self._redrawn and parse_bar(plain(self._line)):
            return ""
        text = self._shown().strip("\n")
        return _styled(text, self._style)[0] if self._styled else text

    def _decode(self, text: str) -> str:
        """Remove terminal codes, but for those of colours, which become marks; make other control characters visible,
        and hold back a code that is cut in two."""
        text = _without_marks(text)
        if _UP in text:
            if (cut := _UNFINISHED_CODE.search(text, max(0, len(text) - 256))) is not None:
                text, self._code = text[: cut.start()], cut.group()
            text = _CODE.sub(_kept, text)
            self._styled = self._styled or BEGIN in text
        return _CONTROL_IN_LINE.sub(_escaped, text)

    def _add_piece(self, piece: str, bars: list[Draw]) -> None:
        if piece.count("\r") > 8:  # a thousand redraws in one batch: only the last ones can be seen
            piece = "\r" + "\r".join(piece.rsplit("\r", 8)[1:])
        for token in re.split(f"(\r|{_UP}+)", piece) if "\r" in piece or _UP in piece else (piece,):
            if token == "\r":
                self._over = True
            elif token.startswith(_UP):
                self._move_up(len(token), bars)
            elif "\b" in token or (token and self._back):
                self._add_over(token, bars)
            elif token:
                self._add(token, bars)

    def _add_over(self, text: str, bars: list[Draw]) -> None:
        """Add a text with backspaces, or at a cursor that they have moved: it is written over what stands there."""
        for token in filter(None, re.split("(\b+)", text)):
            if token[0] != "\b":
                rest = ""
                if self._back and not self._over:
                    self._line, token = plain(self._line), plain(token)  # a line that is written over has no colours
                    end = len(self._line) - self._back
                    rest, self._line = self._line[end + len(token) :], self._line[:end]
                self._add(token, bars)
                self._line, self._back = self._line + rest, len(rest)
            elif not self._over:
                self._cut, over = max(0, self._cut - len(token)), max(0, len(token) - self._cut)
                self._back = min(len(plain(self._line)), self._back + over)

    def _add(self, text: str, bars: list[Draw]) -> None:
        if self._over:
            self._draw(0, bars)
            self._reset()
            self._redrawn = True
        room = LINE_CHARACTERS - len(self._line)
        if self._styled and len(text) > room:  # a line that is cut has no colours
            self._style = _styled(self._line + text, self._style)[1]
            self._line, text = plain(self._line), plain(text)
            room = LINE_CHARACTERS - len(self._line)
        self._line += text[:room]
        self._cut += max(0, len(text) - room)

    def _move_up(self, rows: int, bars: list[Draw]) -> None:
        # tqdm draws a nested bar as newlines, the bar, and as many moves up: their number is its depth.
        if self._redrawn and not self._draw(rows, bars) and self._line:
            return
        self._reset()
        self._on_bar = True

    def _newline(self, lines: list[str], bars: list[Draw]) -> None:
        swallowed = self._on_bar and not plain(self._line).strip()
        if not swallowed and not self._draw(0, bars):
            lines.append(self._commit(self._shown()) if self._styled else self._shown())
            self._line = ""
        self._reset()

    def _draw(self, depth: int, bars: list[Draw]) -> bool:
        """Record the change of a bar by the current text. Return False if the text is no bar and clears none."""
        if not self._redrawn or not self._line:
            return False
        line = plain(self._line)
        bar = parse_bar(line)
        if bar or not line.strip():
            bars.append((depth, bar))
            return True
        return False

    def _shown(self) -> str:
        text = self._line.rstrip() if self._redrawn else self._line
        return f"{text}... ({self._cut:,} more characters in the log)" if self._cut else text

    def _commit(self, text: str) -> str:
        """Return the text with its colours, and remember the style in force after it."""
        text, self._style = _styled(text, self._style)
        return text

    def _reset(self) -> None:
        if self._styled and self._line:
            self._commit(self._line)
        self._line, self._cut, self._back = "", 0, 0
        self._over = self._redrawn = self._on_bar = False


def without_codes(text: str) -> str:
    """Return a whole text as a terminal would show it at the end: without terminal codes, other control characters
    visible."""
    return "\n".join(Stream().feed(f"{text}\n").lines)


def for_terminal(text: str, stream: TextIO) -> str:
    """Return a text as it is or, if the stream is a terminal, without codes other than those of colours, which could
    set the terminal's title or fill its clipboard, and with other control characters visible."""
    if not is_terminal(stream):
        return text
    pieces = [piece if _COLOURS.fullmatch(piece) else _CODE.sub("", piece) for piece in _COLOURS.split(text)]
    return "".join(piece if piece.startswith("\x1b") else _CONTROL_OF_TEXT.sub(_escaped, piece) for piece in pieces)


def styled_lines(text: str) -> list[tuple[str, tuple[Span, ...]]]:
    """Return the lines of a whole text as a terminal would show them at the end, each with the spans of its colours."""
    lines = Stream().feed(text if text.endswith("\n") else f"{text}\n").lines if text else []
    return [(line, getattr(line, "spans", ())) for line in lines]


def visible(text: str) -> str:
    """Make every control character of a terminal visible, except for line ends and tabs."""
    return _CONTROL.sub(_escaped, text.replace("\x1b", "\\x1b"))


def _escaped(match: re.Match[str]) -> str:
    return f"\\x{ord(match.group()):02x}"


def _kept(code: re.Match[str]) -> str:
    """Return what replaces a code: a mark for a colour, a character for each upward move of the cursor."""
    if code[2] == "m" and not code[1].startswith(("?", ">", "<", "=")):
        return _marked(code[1])
    return _UP * min(_number(code[1] or "1"), 20) if code[2] == "A" and (code[1] or "1").isdigit() else ""


def parse_bar(text: str) -> Progress | None:
    """Return the progress that a line shows if it is one of tqdm's bars."""
    bar = tqdm.parse_bar(text)
    return None if bar is None else Progress(**asdict(bar))


class _StyledText(str):
    """A text without codes, and the spans of its colours."""

    spans: tuple[Span, ...] = ()


def _without_marks(text: str) -> str:
    """Return the text of a rank without the characters that are marks here."""
    return _RANK_MARKS.sub("\ufffd", text)


def _marked(parameters: str) -> str:
    """Return the mark of a code with these parameters."""
    return f"{BEGIN}{parameters}{END}"


def _marks(text: str) -> str:
    """Return the marks of a text, without the text."""
    return "".join(found[0] for found in _MARK.finditer(text))


def plain(text: str) -> str:
    return _MARK.sub("", text) if BEGIN in text else text


def _styled(text: str, style: str) -> tuple[_StyledText, str]:
    """Return a text without its marks and with its spans, and the style in force after it; `style` is in force before
    it."""
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
    result = _StyledText("".join(parts))
    result.spans = tuple(spans)
    return result, style


def _number(digits: str) -> int:
    """Return a number in a code; of one with many digits, some number that no code has."""
    return int(digits[:_DIGITS])


def _after(style: str, parameters: str) -> str:
    """Return the style that results when a code is applied to the present one."""
    words = {word[0]: word for word in style.split()}
    numbers = [_number(each) if each.isdigit() else 0 for each in re.split("[;:]", parameters)]
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
    """Consume the parameters of a colour, given by number or by components; empty if they are not a colour."""
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
    """Return the style as CSS declarations that need no style sheet."""
    words = {word[0]: word[1:] for word in style.split()}
    names = {"f": "color", "b": "background-color"}
    if "b" in words and "f" not in words:
        words["f"] = "#ffffff" if not words["b"].startswith("#") else ""
    colours = (f"{names[key]}:{_colour(words[key])}" for key in "fb" if words.get(key))
    weights = {"B": "font-weight:bold", "I": "font-style:italic", "U": "text-decoration:underline"}
    return ";".join(chain(colours, (weights[key] for key in "BIU" if key in words)))


def _colour(word: str) -> str:
    return word if word.startswith("#") else _PALETTE[int(word)]
