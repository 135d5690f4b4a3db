"""Encodes output, reports and exceptions of the ranks of a Spark task as lines for the notebook.

The lines are sent as Spark log lines of at most 4000 characters. Several processes share a pipe, so each line is
written at once and is short enough to stay in one piece. Unmarked lines come from other code. The token in the mark
keeps others who can reach Spark's log server from forging events. Ranks and kernel.
"""

from __future__ import annotations

import base64
import hmac
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.link import LinkError, decode_frame, encode

TEXT_CHARACTERS = 800
"""Characters of text in one line: at most 3200 bytes, which a pipe takes at once (PIPE_BUF, pipe(7))."""
EVENT_CHARACTERS = 3000
_MARK, _END = "\x1e", "|"  # white space at the end would be stripped
_STREAMS = {"o": "stdout", "e": "stderr"}
_KINDS = {stream: kind for kind, stream in _STREAMS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Printed:
    """A piece of a rank's output; `rank` is negative if unknown."""

    rank: int
    stream: str
    text: str


def of_text(token: str, rank: int, stream: str, text: str) -> Iterator[str]:
    """Yield the lines for a piece of output."""
    kind = _KINDS[stream]
    for line in _split(text):
        body, ended = line.removesuffix("\n"), line.endswith("\n")
        parts = [body[at : at + TEXT_CHARACTERS] for at in range(0, len(body), TEXT_CHARACTERS)] or [""]
        for part in parts[:-1]:
            yield f"{_MARK}{token} {rank} {kind} {part}{_END}\n"
        yield f"{_MARK}{token} {rank} {kind.upper() if ended else kind} {parts[-1]}{_END}\n"


def _split(text: str) -> list[str]:
    """Split at newlines only, since a carriage return redraws a line."""
    return [f"{line}\n" for line in text.split("\n")[:-1]] + ([rest] if (rest := text.rpartition("\n")[2]) else [])


def of_event(token: str, rank: int, event: m.RunEvent) -> Iterator[str]:
    """Yield the lines for an event."""
    code = base64.b64encode(encode(event)).decode()
    parts = [code[at : at + EVENT_CHARACTERS] for at in range(0, len(code), EVENT_CHARACTERS)]
    for part in parts[:-1]:
        yield f"{_MARK}{token} {rank} v {part}{_END}\n"
    yield f"{_MARK}{token} {rank} V {parts[-1]}{_END}\n"


def is_marked(text: str, token: str) -> bool:
    """Return whether a text is a line with this token."""
    return text.startswith(f"{_MARK}{token} ")


@dataclass(slots=True, kw_only=True)
class Reader:
    """Reads the lines of all ranks of a run."""

    token: str
    _events: dict[int, str] = field(default_factory=dict)
    """The received part of an event, by rank."""

    def knows(self, line: str) -> bool:
        """Return whether a line has the token."""
        given = line.partition(" ")[0].encode("utf-8", "replace")
        return hmac.compare_digest(given, f"{_MARK}{self.token}".encode())

    def read(self, line: str) -> Printed | m.Message | None:
        """Decode a line; None for a part of an event. Spark has stripped its trailing white space."""
        rank, _, rest = line.partition(" ")[2].partition(" ")
        kind, _, body = rest.partition(" ")
        if not self.knows(line) or not re.fullmatch("[0-9]{1,9}", rank) or not body.endswith(_END):
            return Printed(rank=-1, stream="stderr", text=f"{line}\n")
        body = body.removesuffix(_END)
        if kind.lower() in _STREAMS:
            return Printed(rank=int(rank), stream=_STREAMS[kind.lower()], text=f"{body}\n" if kind.isupper() else body)
        code = self._events.pop(int(rank), "") + body
        if kind == "v":
            self._events[int(rank)] = code
            return None
        try:
            return decode_frame(base64.b64decode(code))[0]
        except (ValueError, LinkError):
            return None
