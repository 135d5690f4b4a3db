"""The output of a rank as lines and as tqdm's bars. Kernel side; no thread, no clock, standard library only.

    Stream.feed(text)   joins pieces, folds \\r and terminal codes   -->  complete lines, with their colours
                                                                   -->  bars, drawn at a depth or cleared
                                                                   -->  the clearing that came before them

Memory is bounded for any text: a line is cut at `LINE_CHARACTERS`.
"""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import NamedTuple

from jupyter_distrib.kernel.record import terminal_styles
from jupyter_distrib.libraries import tqdm
from jupyter_distrib.system.data_class import data_class

LINE_CHARACTERS = 4000
"""The length at which a line is cut, with a note on the length of the rest: a line may have 100 MB."""


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
_UP = "\x1b"
"""The character that stands for one cursor move up after terminal codes are removed; no other escape is left."""
_CODE = re.compile(r"\x1b(?:\[([0-9;:?<=>!]*)([ -/]*[@-~])|[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[ -/]*[0-~])?")
_UNFINISHED_CODE = re.compile(r"\x1b(?:\[[0-9;:?<=>!]*[ -/]*|[\]PX^_][^\x07\x1b\n]*\x1b?|[ -/]*)\Z")
_CLEAR = re.compile(r"\x1b\]distrib-clear;(\d+)(;wait)?\x07")
"""The code by which a rank's `clear_output` marks its place among what is printed (`worker/output/displaying.py`)."""
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f]")


class Fed(NamedTuple):
    """The content of a piece of output."""

    lines: list[str]
    """Complete lines; `StyledText` if they have colours."""
    bars: list[Draw]
    cleared: int
    """The number of the `clear_output` after which these lines came; 0 if there was none."""


class Stream:
    """A parser that makes lines from a rank's stdout or stderr, which arrives in pieces that end at any character."""

    __slots__ = ("_clear", "_cleared", "_code", "_cut", "_line", "_on_bar", "_over", "_redrawn", "_style", "_styled")

    def __init__(self, cleared: int = 0) -> None:
        self._cleared = cleared
        """The number of the last `clear_output` that has taken effect in any stream of the rank."""
        self._clear = 0
        """The number of a `clear_output(wait=True)` that waits for more text; 0 if none does."""
        self._line = ""
        self._cut = 0
        """The number of characters of the current line beyond `LINE_CHARACTERS`."""
        self._over = False
        """Whether a carriage return came: the next character starts the line anew, unless it is the newline of
        `\\r\\n`."""
        self._redrawn = False
        """Whether a carriage return started the current text."""
        self._on_bar = False
        """Whether the cursor was moved up onto a bar, so that a newline only steps down again."""
        self._code = ""
        self._styled = False
        """Whether a code of a colour has come."""
        self._style = ""
        """The style at the beginning of the current line; see `terminal_styles`."""

    def feed(self, text: str) -> Fed:
        """Parse text. Return the lines that are complete now, and the changes to tqdm's bars."""
        lines: list[str] = []
        bars: list[Draw] = []
        text, self._code = self._code + text, ""
        cleared = 0
        if self._clear or (_UP in text and _CLEAR.search(text)):
            text, cleared = self._after_clears(text)
        *complete, rest = self._decode(text).split("\n")
        for piece in complete:
            plain = len(piece) <= LINE_CHARACTERS and "\r" not in piece and _UP not in piece
            if plain and not (self._line or self._over or self._on_bar):
                lines.append(self._commit(piece) if self._styled else piece)
            else:
                self._take(piece, bars)
                self._newline(lines, bars)
        self._take(rest, bars)
        if self._redrawn and (bar := parse_bar(terminal_styles.plain(self._line))):
            bars.append((None, bar))
        return Fed(lines, bars, cleared)

    def clear(self, number: int) -> bool:
        """Note that a `clear_output` has taken effect; return whether the text so far has to go with it."""
        self._cleared = max(self._cleared, number)
        if not 0 < self._clear <= number:
            return False
        self._clear = 0
        self._reset()
        return True

    def _after_clears(self, text: str) -> tuple[str, int]:
        """Return the text behind the last clearing that takes effect, and the number of that one; 0 if none does."""
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
        """Return the current line, unless it is a bar."""
        if self._redrawn and parse_bar(terminal_styles.plain(self._line)):
            return ""
        text = self._shown().strip("\n")
        return terminal_styles.styled(text, self._style)[0] if self._styled else text

    def _decode(self, text: str) -> str:
        """Remove terminal codes, but for those of colours, which become marks; make other control characters visible,
        and hold back a code that is cut in two."""
        text = terminal_styles.without_marks(text)
        if _UP in text:
            if (cut := _UNFINISHED_CODE.search(text, max(0, len(text) - 256))) is not None:
                text, self._code = text[: cut.start()], cut.group()
            text = _CODE.sub(_kept, text)
            self._styled = self._styled or terminal_styles.BEGIN in text
        return _CONTROL.sub(_escaped, text)

    def _take(self, piece: str, bars: list[Draw]) -> None:
        if piece.count("\r") > 8:  # a thousand redraws in one batch: only the last ones can be seen
            piece = "\r" + "\r".join(piece.rsplit("\r", 8)[1:])
        for token in re.split(f"(\r|{_UP}+)", piece) if "\r" in piece or _UP in piece else (piece,):
            if token == "\r":
                self._over = True
            elif token.startswith(_UP):
                self._move_up(len(token), bars)
            elif token:
                self._add(token, bars)

    def _add(self, text: str, bars: list[Draw]) -> None:
        if self._over:
            self._draw(0, bars)
            self._reset()
            self._redrawn = True
        room = LINE_CHARACTERS - len(self._line)
        if self._styled and len(text) > room:  # a line that is cut has no colours
            self._style = terminal_styles.styled(self._line + text, self._style)[1]
            self._line, text = terminal_styles.plain(self._line), terminal_styles.plain(text)
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
        swallowed = self._on_bar and not terminal_styles.plain(self._line).strip()
        if not swallowed and not self._draw(0, bars):
            lines.append(self._commit(self._shown()) if self._styled else self._shown())
            self._line = ""
        self._reset()

    def _draw(self, depth: int, bars: list[Draw]) -> bool:
        """Record the change of a bar by the current text. Return False if the text is no bar and clears none."""
        if not self._redrawn or not self._line:
            return False
        line = terminal_styles.plain(self._line)
        bar = parse_bar(line)
        if bar or not line.strip():
            bars.append((depth, bar))
            return True
        return False

    def _shown(self) -> str:
        text = self._line.rstrip() if self._redrawn else self._line
        return f"{text}... ({self._cut:,} more characters in the log)" if self._cut else text

    def _commit(self, text: str) -> str:
        """Return the text with its colours, and note the style that holds behind it."""
        text, self._style = terminal_styles.styled(text, self._style)
        return text

    def _reset(self) -> None:
        if self._styled and self._line:
            self._commit(self._line)
        self._line, self._cut = "", 0
        self._over = self._redrawn = self._on_bar = False


def without_codes(text: str) -> str:
    """Return a whole text as a terminal would show it at the end: without terminal codes, other control characters
    visible."""
    return "\n".join(Stream().feed(f"{text}\n").lines)


def styled_lines(text: str) -> list[tuple[str, tuple[terminal_styles.Span, ...]]]:
    """Return the lines of a whole text as a terminal would show them at the end, each with the spans of its colours."""
    lines = Stream().feed(text if text.endswith("\n") else f"{text}\n").lines if text else []
    return [(line, getattr(line, "spans", ())) for line in lines]


def visible(text: str) -> str:
    """Make every control character of a terminal visible, except for line ends and tabs."""
    return _CONTROL.sub(_escaped, text.replace("\x1b", "\\x1b"))


def _escaped(match: re.Match[str]) -> str:
    return f"\\x{ord(match.group()):02x}"


def _kept(code: re.Match[str]) -> str:
    """Return what stands for a code: a mark for a colour, a character for each move of the cursor upwards."""
    if code[2] == "m" and not code[1].startswith(("?", ">", "<", "=")):
        return terminal_styles.marked(code[1])
    return _UP * min(int(code[1] or 1), 20) if code[2] == "A" and (code[1] or "1").isdigit() else ""


def parse_bar(text: str) -> Progress | None:
    """Return the progress that a line shows, if it is a bar of tqdm."""
    bar = tqdm.parse_bar(text)
    return None if bar is None else Progress(**asdict(bar))
