"""The first and the last output lines of all ranks of a run, in order of arrival.

Part of the fold in `kernel/record/record.py`; kernel side; no thread, no clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Sequence
from itertools import islice

from jupyter_distrib.kernel.record.terminal_stream import Span
from jupyter_distrib.system.data_class import data_class

HEAD_LINES = 200
RANK_HEAD_LINES = 20
"""Number of first lines to keep of each rank, however much the others have written."""
MOST_HEAD_LINES = 2000
TAIL_LINES = 1000


@data_class
class Line:
    """One line of output, or (`skipped` > 0, no text) the place where that many lines were left out."""

    rank: int | None
    """The rank that wrote the line; None for a gap in the lines of several ranks."""
    stream: str = "stdout"
    text: str = ""
    skipped: int = 0
    spans: tuple[Span, ...] = ()
    """The parts of the text that have a colour or weight; see `terminal_stream.py`."""
    cleared: bool = False
    """Whether this is not a line but a marker: the rank has cleared the earlier lines of this stream."""


class Lines:
    """The first and the last lines of a run's output; memory is bounded for any amount of output."""

    def __init__(self) -> None:
        self.entries = 0
        self.count = 0
        self._head: list[tuple[int, Line]] = []
        """Numbered entries, as in the tail, but never dropped; the numbers rise."""
        self._tail: deque[tuple[int, Line]] = deque()
        self._first: defaultdict[int | None, int] = defaultdict(int)
        """The number of lines of each rank in the head."""
        self._dropped: defaultdict[tuple[int | None, str], int] = defaultdict(int)
        """The number of lines that are not kept, by rank and stream."""

    def append(self, line: Line) -> None:
        self.count += line.skipped or 1
        self._append(line)

    def extend(self, rank: int, stream: str, texts: Sequence[str]) -> None:
        """Append lines of one stream; only count lines that would be dropped at once, as in a flood of output."""
        first = 0
        while first < len(texts) and self._has_room_in_head(rank):
            self.append(line_of(rank, stream, texts[first]))
            first += 1
        surplus = max(0, len(texts) - first - TAIL_LINES)
        rest = texts[first + surplus :]
        self._make_room(len(rest))
        self._dropped[rank, stream] += surplus
        lines = [line_of(rank, stream, text) for text in rest]
        self._tail.extend(enumerate(lines, self.entries + surplus))
        self.entries += surplus + len(rest)
        self.count += surplus + len(rest)

    def clear(self, rank: int, stream: str) -> None:
        """Drop the lines of one stream; readers find a marker in their place."""
        self._head = [entry for entry in self._head if not _is_of(entry[1], rank, stream)]
        self._tail = deque(entry for entry in self._tail if not _is_of(entry[1], rank, stream))
        self._dropped.pop((rank, stream), None)
        self._first[rank] = sum(line.rank == rank for _, line in self._head)
        self._append(Line(rank=rank, stream=stream, cleared=True))

    def since(self, entry: int) -> list[Line]:
        """Return the lines from this entry number on, with one gap for the lines that were dropped."""
        head = self._head[bisect_left(self._head, entry, key=_number) :]
        start = self._tail[0][0] if self._tail else self.entries
        dropped = sum(self._dropped.values())
        late = bisect_left(head, start, key=_number)
        gone = dropped if entry < start and entry <= HEAD_LINES else min(dropped, start - entry - late)
        gap = [Line(rank=None, skipped=gone)] if gone > 0 else []
        tail = islice(self._tail, bisect_left(self._tail, entry, key=_number), None)
        rest = sorted([*head[late:], *tail], key=_number) if late < len(head) else tail
        return [*(line for _, line in head[:late]), *gap, *(line for _, line in rest)]

    def _append(self, line: Line) -> None:
        number = self.entries
        self.entries += 1
        if self._has_room_in_head(line.rank):
            self._head.append((number, line))
            self._first[line.rank] += 1
            return
        self._make_room(1)
        self._tail.append((number, line))

    def _make_room(self, count: int) -> None:
        """Drop the oldest lines of the tail to make room for this many."""
        for _ in range(len(self._tail) + count - TAIL_LINES):
            old = self._tail.popleft()[1]
            self._dropped[old.rank, old.stream] += old.skipped or (not old.cleared)

    def _has_room_in_head(self, rank: int | None) -> bool:
        length = len(self._head)
        return length < HEAD_LINES or (length < MOST_HEAD_LINES and self._first[rank] < RANK_HEAD_LINES)


def line_of(rank: int, stream: str, text: str) -> Line:
    """Return a line with the text of a stream, which may have colours."""
    return Line(rank=rank, stream=stream, text=text, spans=getattr(text, "spans", ()))


def _number(entry: tuple[int, Line]) -> int:
    return entry[0]


def _is_of(line: Line, rank: int, stream: str) -> bool:
    return line.rank == rank and line.stream == stream
