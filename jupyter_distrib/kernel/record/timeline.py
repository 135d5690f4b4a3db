"""The course of a run over time: each rank's usage and progress, once a second. Kernel side; no clock.

Kept from the samples that a record folds anyway. When the list is full, every second point is dropped, so that it
always spans the whole run.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jupyter_distrib.kernel.record.nested_progress import position, steps_on, with_inner
from jupyter_distrib.kernel.record.terminal_stream import Progress

RECENT_S = 60
"""Seconds of recent usage to keep, one point for each."""
POINTS = 240
COLUMNS = 100
NOTICEABLE_S = 0.4
"""Tolerance in seconds: samples of ranks at the same step may be this far apart, since they are not taken at one
moment."""
FEWEST_S = 5.0
"""Minimum duration in seconds for a course worth drawing."""
LEVELS = 9
NONE = "."
"""Level while a rank was not running."""


class Use(NamedTuple):
    """Usage in one second: percent of the GPU, or of a core without one, and bytes of memory."""

    percent: float
    memory_bytes: int


class Place(NamedTuple):
    """Number of steps that a rank had done at a time."""

    at_s: float
    step: float


class Seen(NamedTuple):
    """The measurements of a rank at a time."""

    at_s: float
    percent: float
    memory_bytes: int
    communication_s: float | None
    """Seconds in communication with other ranks so far; None if unknown."""


@dataclass(slots=True)
class Course:
    """The course of one rank."""

    uses: list[Use] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    bars: tuple[Progress, ...] = ()
    """The loops whose steps are counted, as last seen; empty if the steps are an optimizer's."""

    def use(self, percent: float, memory_bytes: int) -> None:
        """Record the usage of the last second."""
        self.uses = [*self.uses[1 - RECENT_S :], Use(percent, memory_bytes)]

    def see(self, seen: Seen) -> None:
        """Record a sample for the whole run."""
        self.seen.append(seen)
        if len(self.seen) > POINTS:
            del self.seen[-2::-2]

    def come_to(self, bars: tuple[Progress, ...], at_s: float) -> None:
        """Record the rank's position in its loops."""
        bars = with_inner(bars, self.bars)
        steps = steps_on(self.bars, bars) if self.places else None
        if steps is None:
            self.places = []
        self._add(position(bars) if steps is None else self.places[-1].step + steps, at_s)
        self.bars = bars

    def count(self, step: int, at_s: float) -> None:
        """Record the number of optimizer steps, for a rank without bars."""
        if not self.bars:
            self._add(step, at_s)

    def _add(self, step: float, at_s: float) -> None:
        self.places.append(Place(at_s, step))
        if len(self.places) > POINTS:
            del self.places[-2::-2]


class Levels(NamedTuple):
    """The distance of each rank from the front one, over a run: one text for each rank, with a character for each part
    of the time. `0` is no distance, and each level is up to twice as many steps as the one before; `.` means that the
    rank was not running."""

    seconds: float
    rows: Mapping[int, str]

    @property
    def show_delay(self) -> bool:
        """Return whether some rank was more than a step or two behind for some time."""
        return any(sum(level not in ".01" for level in row) >= 2 for row in self.rows.values())


def levels(
    courses: Mapping[int, Sequence[Place]], ended_s: Mapping[int, float], span: tuple[float, float] | None = None
) -> Levels | None:
    """Return the levels of all ranks; None for a run of one rank, or of a few seconds.

    Args:
        courses: The places of each rank.
        ended_s: The time at which each rank ended, if it has.
        span: Beginning and end of the time; None for the time that the places span.
    """
    courses = {rank: places for rank, places in courses.items() if len(places) > 1}
    if len(courses) < 2:
        return None
    first_s = min(places[0].at_s for places in courses.values())
    began_s, last_s = span or (first_s, max(places[-1].at_s for places in courses.values()))
    if last_s - began_s < FEWEST_S:
        return None
    count = max(2, min(COLUMNS, int(last_s - began_s)))
    length_s = (last_s - began_s) / count
    times = [began_s + length_s * (column + 1) for column in range(count)]
    steps = {rank: [_step(places, at_s, ended_s.get(rank)) for at_s in times] for rank, places in courses.items()}
    # Ranks that have ended stay part of the front: those that they have left behind are still as far back.
    passed = [[_step(places, at_s, None) or 0.0 for at_s in times] for places in courses.values()]
    front = [max(column) for column in zip(*passed, strict=True)]
    noise = [NOTICEABLE_S * (now - before) / length_s for before, now in zip([front[0], *front], front, strict=False)]
    noise[0] = noise[1]
    rows = {
        rank: "".join(_level(at, ahead, least) for at, ahead, least in zip(each, front, noise, strict=True))
        for rank, each in steps.items()
    }
    return Levels(last_s - began_s, rows)


def _step(places: Sequence[Place], at_s: float, ended_s: float | None) -> float | None:
    """Return a rank's step at a time, interpolated between the samples around that time; None if it was not running."""
    if at_s < places[0].at_s or (ended_s is not None and at_s > ended_s):
        return None
    index = bisect_right(places, at_s, key=lambda place: place.at_s)
    before = places[index - 1]
    if index == len(places):
        return before.step
    after = places[index]
    share = (at_s - before.at_s) / ((after.at_s - before.at_s) or 1.0)
    return before.step + share * (after.step - before.step)


def _level(step: float | None, front: float, noise: float) -> str:
    if step is None:
        return NONE
    steps = front - step
    return "0" if steps < max(1.0, noise) else str(min(LEVELS, int(steps).bit_length()))
