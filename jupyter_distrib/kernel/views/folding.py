"""The output of all ranks with equal lines merged. Kernel side; pure functions of lines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from jupyter_distrib.kernel.record.output_lines import Line

FOLD_WINDOW = 64
"""The number of last lines among which an equal line is looked for."""


@dataclass(slots=True)
class Folded:
    """A line of output, and the ranks that wrote exactly this line."""

    line: Line
    ranks: list[int] = field(default_factory=list)

    @property
    def weight(self) -> int:
        return self.line.skipped or len(self.ranks)


def folded_lines(lines: Iterable[Line]) -> list[Folded]:
    """Merge equal lines of several ranks that are near each other; the lines of each rank keep their order.

    Ranks send their lines in batches, so equal lines are rarely direct neighbours.
    """
    folding = _Folding()
    for line in lines:
        if line.skipped:
            folding.add_gap(line)
        elif not line.cleared:
            folding.add(line)
    return folding.folded


class _Folding:
    """The lines so far, of which equal ones are merged."""

    def __init__(self) -> None:
        self.folded: list[Folded] = []
        self._last: dict[tuple[str, str], int] = {}
        """The last place of each text and stream: the first lines of a batch are often the same as the first ones of
        the batch before, which is out of reach."""

    def add_gap(self, gap: Line) -> None:
        before = self.folded[-1].line if self.folded else None
        if before is None or not before.skipped:
            self.folded.append(Folded(gap))
            return
        rank = gap.rank if gap.rank == before.rank else None
        self.folded[-1].line = Line(rank=rank, skipped=before.skipped + gap.skipped)

    def add(self, line: Line) -> None:
        key = line.text, line.stream
        if (place := self._equal_place(line, self._last.get(key, -1))) is None:
            self._last[key] = len(self.folded)
            self.folded.append(Folded(line, _ranks(line)))
        else:
            self._join(place, line)

    def _equal_place(self, line: Line, last: int) -> int | None:
        """Return the place of the first equal line near the end that this rank may join: after the last one it shares.
        `last` is the place of the last equal line."""
        place, oldest = None, max(0, len(self.folded) - FOLD_WINDOW)
        for index in range(len(self.folded) - 1, oldest - 1, -1) if last >= oldest else ():
            other = self.folded[index]
            if other.line.skipped or (line.rank in other.ranks and len(other.ranks) > 1):
                break
            if other.line.text == line.text and other.line.stream == line.stream and line.rank not in other.ranks:
                place = index
        return place

    def _join(self, place: int, line: Line) -> None:
        """Add the rank to a line; the lines that it wrote alone before this line go in front of it."""
        behind = self.folded[place:]
        own = [each for each in behind if line.rank in each.ranks]
        rest = [each for each in behind if line.rank not in each.ranks]
        rest[0].ranks += _ranks(line)
        if own:
            self.folded[place:] = own + rest
            self._last |= {(each.line.text, each.line.stream): at for at, each in enumerate(own + rest, place)}


def _ranks(line: Line) -> list[int]:
    return [] if line.rank is None else [line.rank]
