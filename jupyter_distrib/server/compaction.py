"""Selects the part of a long record that is worth sending again. Pure; runs in the agent.

Output is left out, and replaced by the number of its lines; the logs have all of it. Of reported numbers every second
one is left out, so that the rest span the whole run. Of events that only report a state, the newest stays.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import TypeAlias

from jupyter_distrib.wire.descriptors import Descriptors
from jupyter_distrib.wire.messages import (
    Cleared,
    Displayed,
    Event,
    Measured,
    Moved,
    Noted,
    Progressed,
    Sampled,
    StackSeen,
    Stalled,
    Wrote,
)

NEWEST = 100
"""Number of notes, and of one rank's displays and loops, that are kept: more are not shown."""

Entry: TypeAlias = tuple[Event, Descriptors]


def thinned(entries: Sequence[Entry]) -> tuple[list[Entry], list[Displayed]]:
    """Leave out dispensable events. Return the rest, and the displays that are left out."""
    choice = _Choice(entries)
    left: deque[Entry] = deque()
    displays = []
    for event, descriptors in reversed(entries):
        if choice.keeps(event):
            left.appendleft((event, descriptors))
        elif isinstance(event, Displayed):
            displays.append(event)
    return [(choice.gap(event) if isinstance(event, Wrote) else event, each) for event, each in left], displays


class _Choice:
    """A choice among events, which it takes from the newest to the oldest."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._lines: Counter[tuple[int, str]] = Counter()
        """Number of lines left out, by rank and stream."""
        self._counts: Counter[Hashable] = Counter()
        self._peaks: dict[int, Sampled] = {}
        """The one sample of each rank that is worth keeping."""
        for event, _ in entries:
            if isinstance(event, Sampled) and (
                event.rank not in self._peaks or _use(event) > _use(self._peaks[event.rank])
            ):
                self._peaks[event.rank] = event

    def keeps(self, event: Event) -> bool:
        match event:
            case Wrote():
                self._lines[event.rank, event.stream] += event.skipped_lines + event.text.count("\n")
                return self._first(Wrote, event.rank, event.stream)
            case Sampled():
                return self._peaks[event.rank] is event
            case Measured():
                new = [self._first(Measured, event.rank, name) for name in event.values]
                return any(new) or self._number(Measured, event.rank) % 2 == 0
            case Progressed():
                new_loop = self._first(Progressed, event.rank, event.label)
                return new_loop and self._number(Progressed, event.rank) <= NEWEST
            case Displayed():
                return self._number(Displayed, event.rank) <= NEWEST
            case Cleared():
                return self._first(Cleared, event.rank)
            case Noted():
                return self._number(Noted) <= NEWEST
            case StackSeen():
                return self._first(StackSeen, event.rank)
            case Stalled() | Moved():
                return self._first(Stalled)
            case _:
                return True

    def gap(self, last: Wrote) -> Wrote:
        """Return an event for the place where output was left out."""
        return replace(last, text="", skipped_lines=self._lines[last.rank, last.stream])

    def _number(self, *key: Hashable) -> int:
        """Count one more event of this kind, and return the count."""
        self._counts[key] += 1
        return self._counts[key]

    def _first(self, *key: Hashable) -> bool:
        return self._number(*key, "first") == 1


def _use(event: Sampled) -> tuple[int, int]:
    return event.gpu_memory_bytes or 0, event.rss_bytes
