"""The steps at which a reported number was nan or infinite. Kernel side; no clock, standard library only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import isfinite

from jupyter_distrib.system.data_class import data_class
from jupyter_distrib.system.formatting import rank_list


@data_class
class NotFinite:
    """The steps at which a metric was nan or infinite; only the last such steps, if this happened more than once."""

    word: str
    """`nan`, `inf` or `-inf`."""
    first: int
    last: int
    is_now: bool
    """Whether the metric is still not finite."""

    @property
    def text(self) -> str:
        """The phrase `nan from step 31`, `nan at step 12` or `nan at steps 12-20`.

        `notFiniteText` in `static/words.js` says the same.
        """
        if self.is_now:
            return f"{self.word} from step {self.first}"
        if self.last > self.first:
            return f"{self.word} at steps {self.first}-{self.last}"
        return f"{self.word} at step {self.first}"


def noted(before: NotFinite | None, step: int, value: float) -> NotFinite | None:
    """Return the entry of a metric after its next report; None if it has always been finite."""
    if isfinite(value):
        return before and replace(before, is_now=False)
    if before is not None and before.is_now:
        return replace(before, last=step)
    return NotFinite(word=str(value), first=step, last=step, is_now=True)


def of_points(points: Iterable[tuple[int, float]]) -> NotFinite | None:
    """Return the entry of a metric after these reports, (step, value)."""
    found: NotFinite | None = None
    for step, value in points:
        found = noted(found, step, value)
    return found


def of_ranks(by_rank: dict[int, NotFinite], reporting: int) -> str:
    """Return one phrase for several ranks: `nan from step 31 on rank 3`; without ranks if all that report it agree."""
    groups: dict[str, list[int]] = {}
    for rank, each in sorted(by_rank.items()):
        groups.setdefault(each.text, []).append(rank)
    if not groups:
        return ""
    worst = min(by_rank.values(), key=lambda each: (not each.is_now, each.first))
    ranks = groups[worst.text]
    return worst.text if len(ranks) == reporting else f"{worst.text} on {rank_list(ranks)}"
