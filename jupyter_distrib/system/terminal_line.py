"""Begins a line of its own in a terminal, where nobody can tell whether the last one has ended: programs and their
threads print parts of lines, and terminals show what is typed. Writes what a stream cannot encode as escapes. Standard
library only."""

from __future__ import annotations

import os
from typing import TextIO

_CLEAR_LINE = "\x1b[K"
_CLEAR_BELOW = "\x1b[J"


def beginning(stream: TextIO) -> str:
    """Return what brings the next text to the beginning of a line and leaves what stands there; empty where the stream
    is no terminal.

    As many blanks as the terminal has columns end an unfinished line, and fill one that is empty; either way, the
    cursor then goes back to the beginning of the line that it is in, and the blanks are cleared."""
    columns = _columns(stream)
    return f"{' ' * columns}\r{_CLEAR_LINE}" if columns else ""


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a stream is a terminal. The user may have replaced it by an object with fewer methods."""
    try:
        return stream is not None and stream.isatty()
    except (AttributeError, OSError, ValueError):
        return False


def encodable(text: str, stream: TextIO) -> str:
    """Return a text with escapes for the characters that a stream cannot encode, such as one of the locale C."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def replacement(stream: TextIO, before: str) -> str:
    """Return what takes an unfinished line away, so that the next text is in its place; empty where the stream is no
    terminal.

    Args:
        stream: Where it stands.
        before: The line, which may be in several rows.
    """
    columns = _columns(stream)
    rows = (len(before) - 1) // columns if columns else 0
    up = f"\x1b[{rows}A" if rows > 0 else ""
    return f"{up}\r{_CLEAR_BELOW}" if columns else ""


def _columns(stream: TextIO) -> int:
    """Return the width of a terminal that can clear a line; 0 for anything else."""
    try:
        able = is_terminal(stream) and os.environ.get("TERM", "dumb") != "dumb"
        return os.get_terminal_size(stream.fileno()).columns if able else 0
    except (OSError, ValueError):  # it has no descriptor, or is closed
        return 0
