"""The course of each rank over a whole run as a table of rank and time, and who waited for whom. Kernel side.

A text for each rank has a digit for each part of the time: `0` is the least, `9` the most, `.` no running rank.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from jupyter_distrib.kernel.record.timeline import COLUMNS, FEWEST_S, NONE, Course, Levels, Seen, levels

BEHIND, BUSY, MEMORY, WAITING = "behind", "busy", "memory", "waiting"
TOP = 9
LEAST_WAIT = 0.1
"""Minimum difference between the waits of two ranks, as a part of a stretch of time, for the longer wait to count as
waiting for the other rank."""
_Spent = Sequence[float | None]
"""The seconds that a rank spent in communication, up to the end of each part of the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverTime:
    """The ranks of a run over time; plain values, as they are saved and sent."""

    seconds: float
    ranks: list[int]
    """The ranks in row order, the slowest first: furthest behind, or waited for longest."""
    rows: dict[str, list[str]]
    """Kind -> a text for each rank. `behind`: levels of `timeline.Levels`; `busy`: of the GPU, or of a core;
    `memory`; `waiting`: the part of the time spent in communication."""
    most: dict[str, float] = field(default_factory=dict)
    """Kind -> the value of the digit 9: percent, bytes, or 1.0 for all of the time."""
    waits: list[list[float]] = field(default_factory=list)
    """Rank, a rank for which it waited, and the seconds; longest first."""
    gpus: bool = False

    @property
    def is_whole(self) -> bool:
        """Return whether there is a text of one length for each rank."""
        texts = [text for rows in self.rows.values() for text in rows]
        return (
            bool(texts)
            and all(len(rows) == len(self.ranks) for rows in self.rows.values())
            and len({len(text) for text in texts}) == 1
            and set("".join(texts)) <= set(f"0123456789{NONE}")
            and all(len(wait) == 3 for wait in self.waits)
        )


def over_time(
    courses: Mapping[int, Course], ended_s: Mapping[int, float], *, gpus: bool, memory_bytes: int | None = None
) -> OverTime | None:
    """Return the course of the ranks; None for a run of a few seconds.

    Args:
        courses: The course of each rank.
        ended_s: The time at which each rank ended, if it has.
        gpus: Whether the ranks have GPUs.
        memory_bytes: The memory that a rank can have; None if unknown.
    """
    seen = {rank: course.seen for rank, course in courses.items() if len(course.seen) > 1}
    if not seen:
        return None
    began_s, last_s = min(each[0].at_s for each in seen.values()), max(each[-1].at_s for each in seen.values())
    if last_s - began_s < FEWEST_S:
        return None
    count = max(2, min(COLUMNS, int(last_s - began_s)))
    length_s = (last_s - began_s) / count
    times = [began_s + length_s * column for column in range(count + 1)]
    places = {rank: _places(each, times, ended_s.get(rank)) for rank, each in seen.items()}
    alike = len({bool(courses[rank].bars) for rank in seen if courses[rank].places}) == 1  # steps of the same kind
    steps = levels({rank: courses[rank].places for rank in seen}, ended_s, span=(began_s, last_s)) if alike else None
    spent = {rank: _spent(each, times) for rank, each in seen.items()}
    waits = _waits(spent, length_s)
    ranks = _order(list(seen), steps, waits)
    every = [each for places_of in places.values() for each in places_of if each is not None]
    most = {
        BUSY: max([100.0, *(each.percent for each in every)]),
        MEMORY: float(memory_bytes or max((each.memory_bytes for each in every), default=0) or 1),
        WAITING: 1.0,
    }
    rows = {
        BUSY: [_text([each and each.percent / most[BUSY] for each in places[rank]]) for rank in ranks],
        MEMORY: [_text([each and each.memory_bytes / most[MEMORY] for each in places[rank]]) for rank in ranks],
    }
    if any(each is not None for of_rank in spent.values() for each in of_rank):
        rows[WAITING] = [_text(_shares(spent[rank], length_s)) for rank in ranks]
    if steps is not None:
        rows[BEHIND] = [steps.rows.get(rank, NONE * count) for rank in ranks]
    found = [[rank, other, round(seconds, 1)] for (rank, other), seconds in waits.items()]
    return OverTime(
        seconds=round(last_s - began_s, 1),
        ranks=ranks,
        rows=rows,
        most={kind: each for kind, each in most.items() if kind in rows},
        waits=sorted(found, key=lambda wait: -wait[2]),
        gpus=gpus,
    )


def _order(ranks: list[int], steps: Levels | None, waits: Mapping[tuple[int, int], float]) -> list[int]:
    rows = steps.rows if steps else {}
    behind = {rank: sum(1 << int(level) for level in row if level not in f"{NONE}01") for rank, row in rows.items()}
    waited: dict[int, float] = defaultdict(float)
    for (_, other), seconds in waits.items():
        waited[other] += seconds
    return sorted(ranks, key=lambda rank: (-behind.get(rank, 0), -waited[rank], rank))


def _places(seen: Sequence[Seen], times: Sequence[float], ended_s: float | None) -> list[Seen | None]:
    """Return the last sample of a rank at the end of each part of the time; None while it did not run."""
    found: list[Seen | None] = []
    for before_s, at_s in pairwise(times):
        place = bisect_right(seen, at_s + 1e-6, key=lambda each: each.at_s)
        over = ended_s is not None and before_s >= ended_s
        found.append(None if not place or over else seen[place - 1])
    return found


def _spent(seen: Sequence[Seen], times: Sequence[float]) -> list[float | None]:
    """Return the seconds in communication up to each of these times, interpolated; None before the first sample and
    after the last one."""
    known = [(each.at_s, each.communication_s) for each in seen if each.communication_s is not None]
    found: list[float | None] = []
    for at_s in times:
        place = bisect_right(known, at_s + 1e-6, key=lambda each: each[0])
        if not place or (place == len(known) and at_s > known[-1][0] + 1e-6):
            found.append(None)
        elif place == len(known):
            found.append(known[-1][1])
        else:
            (from_s, before), (to_s, after) = known[place - 1], known[place]
            found.append(before + (after - before) * (at_s - from_s) / ((to_s - from_s) or 1.0))
    return found


def _shares(spent: _Spent, length_s: float) -> Iterator[float | None]:
    for before, after in pairwise(spent):
        yield None if before is None or after is None else (after - before) / length_s


def _waits(spent: Mapping[int, _Spent], length_s: float) -> dict[tuple[int, int], float]:
    """Return how long each rank waited for which other one. Of ranks that compute together, the one with the least time
    in communication came last, and each other rank waited for it: for the difference between their times."""
    waits: dict[tuple[int, int], float] = defaultdict(float)
    shares = {rank: list(_shares(each, length_s)) for rank, each in spent.items()}
    for column in zip(*shares.values(), strict=True):
        known = [(share, rank) for rank, share in zip(shares, column, strict=True) if share is not None]
        if len(known) < 2:
            continue
        least, last = min(known)
        for share, rank in known:
            if share - least >= LEAST_WAIT:
                waits[rank, last] += (share - least) * length_s
    return waits


def _text(shares: Sequence[float | None] | Iterator[float | None]) -> str:
    return "".join(NONE if share is None else str(min(TOP, max(0, int((TOP + 1) * share + 1e-6)))) for share in shares)
