"""Selects the part of a long record that is worth sending again. Pure; runs in the agent.

Output is left out, and replaced by the number of its lines; the logs have all of it. Of reported numbers every second
one is left out, so that the rest span the whole run. Of events that only report a state, the newest stays.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import TypeAlias

from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.descriptors import Descriptors

NEWEST = 100
"""Number of notes, and of one rank's displays and loops, that are kept: more are not shown."""

Entry: TypeAlias = tuple[m.Event, Descriptors]


def thinned(entries: Sequence[Entry]) -> tuple[list[Entry], list[m.Displayed]]:
    """Leave out dispensable events. Return the rest, and the displays that are left out."""
    choice = _Choice(entries)
    left: deque[Entry] = deque()
    displays = []
    for event, descriptors in reversed(entries):
        if choice.keeps(event):
            left.appendleft((event, descriptors))
        elif isinstance(event, m.Displayed):
            displays.append(event)
    return [(choice.gap(event) if isinstance(event, m.Wrote) else event, each) for event, each in left], displays


class _Choice:
    """A choice among events, which it takes from the newest to the oldest."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._lines: Counter[tuple[int, str]] = Counter()
        """Number of lines left out, by rank and stream."""
        self._counts: Counter[Hashable] = Counter()
        self._peaks: dict[int, m.Sampled] = {}
        """The one sample of each rank that is worth keeping."""
        for event, _ in entries:
            if isinstance(event, m.Sampled) and (
                event.rank not in self._peaks or _use(event) > _use(self._peaks[event.rank])
            ):
                self._peaks[event.rank] = event

    def keeps(self, event: m.Event) -> bool:
        match event:
            case m.Wrote():
                self._lines[event.rank, event.stream] += event.skipped_lines + event.text.count("\n")
                return self._first(m.Wrote, event.rank, event.stream)
            case m.Sampled():
                return self._peaks[event.rank] is event
            case m.Measured():
                new = [self._first(m.Measured, event.rank, name) for name in event.values]
                return any(new) or self._number(m.Measured, event.rank) % 2 == 0
            case m.Progressed():
                new_loop = self._first(m.Progressed, event.rank, event.label)
                return new_loop and self._number(m.Progressed, event.rank) <= NEWEST
            case m.Displayed():
                return self._number(m.Displayed, event.rank) <= NEWEST
            case m.Cleared():
                return self._first(m.Cleared, event.rank)
            case m.Noted():
                return self._number(m.Noted) <= NEWEST
            case m.StackSeen():
                return self._first(m.StackSeen, event.rank)
            case m.Stalled() | m.Moved():
                return self._first(m.Stalled)
            case _:
                return True

    def gap(self, last: m.Wrote) -> m.Wrote:
        """Return an event for the place where output was left out."""
        return replace(last, text="", skipped_lines=self._lines[last.rank, last.stream])

    def _number(self, *key: Hashable) -> int:
        """Count one more event of this kind, and return the count."""
        self._counts[key] += 1
        return self._counts[key]

    def _first(self, *key: Hashable) -> bool:
        return self._number(*key, "first") == 1


def _use(event: m.Sampled) -> tuple[int, int]:
    return event.gpu_memory_bytes or 0, event.rss_bytes
