"""The first and the last output lines of all ranks of a run, in order of arrival.

Part of the fold in `kernel/record/record.py`; kernel side; no thread, no clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

HEAD_LINES = 200
TAIL_LINES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of output, or (`skipped` > 0, no text) the place where that many lines were left out."""

    rank: int | None
    """The rank that wrote the line; None for a gap in the lines of several ranks."""
    stream: str = "stdout"
    text: str = ""
    skipped: int = 0


class Lines:
    """The first and the last lines of a run's output, so that memory is bounded for any amount of output."""

    def __init__(self) -> None:
        self.entries = 0
        self.count = 0
        self._head: list[Line] = []
        self._tail: deque[Line] = deque(maxlen=TAIL_LINES)
        self._dropped = 0

    def append(self, line: Line) -> None:
        self.entries += 1
        self.count += line.skipped or 1
        if len(self._head) < HEAD_LINES:
            self._head.append(line)
            return
        if len(self._tail) == TAIL_LINES:
            self._dropped += self._tail[0].skipped or 1
        self._tail.append(line)

    def since(self, entry: int) -> list[Line]:
        start = self.entries - len(self._tail)
        gone = self._dropped if entry <= len(self._head) else start - entry
        gap = [Line(rank=None, skipped=gone)] if gone > 0 else []
        return [*self._head[entry:], *gap, *list(self._tail)[max(0, entry - start) :]]
