"""The record of a detached run, kept until some kernel asks for it.

A long record is thinned. Output is left out, and replaced by the number of its lines; the logs have all of it. Every
second report of numbers is left out, so that the rest span the whole run. Of events that only report a state, the
newest stays.
"""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from jupyter_distrib.server.worker_group import Client
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.descriptors import NO_DESCRIPTORS, Descriptors

MAX_ENTRIES = 5000
"""Number of entries above which the record is thinned (see `thinned`); the logs have all output."""
MAX_DISPLAY_BYTES = 64 << 20
"""Bytes of displays above which the oldest are left out."""
NEWEST = 100
"""Maximum number of notes to keep, and of displays and loops for each rank: more are not shown."""
Entry: TypeAlias = tuple[m.Event, Descriptors]


class Journal:
    """A detached run's events in order, with the shared memory that holds its values."""

    def __init__(
        self, command: m.Execute, workers: tuple[m.WorkerInfo, ...], world_size: int, *, gpus: bool, notebook: str
    ) -> None:
        self._attached = m.Attached(
            run=command.run,
            label=command.label,
            ranks=command.ranks,
            workers=workers,
            world_size=world_size,
            gpus=gpus,
            strategy=command.setting.strategy,
            started_wall_s=time.time(),
            elapsed_s=0.0,
            trackers=command.trackers,
        )
        self.notebook = notebook
        self._entries: list[Entry] = []
        self._started_s = time.monotonic()
        self.listeners: list[Client[Any]] = []
        """The kernels that follow it."""
        self.ended_s = 0.0
        self.is_read = False
        """Whether a kernel has followed it to the end and received the values."""
        self.value_bytes = 0
        """Size of the shared memory of its values."""
        self._display_bytes = 0
        self._left_out = 0
        """Number of displays that were dropped."""
        self._limit = MAX_ENTRIES
        """Number of entries at which the record is thinned next; it grows with the entries that must stay, so that they
        are not scanned at each event."""

    @property
    def ended(self) -> bool:
        return self.ended_s > 0

    def add(self, event: m.Event, fds: tuple[int, ...]) -> None:
        self._entries.append((event, Descriptors.duplicates(fds)))
        self.value_bytes += sum(os.fstat(fd).st_size for fd in fds)
        if isinstance(event, m.Displayed):
            self._hold_display(event)
        if isinstance(event, m.Ended):
            self.ended_s = time.monotonic()
            self.is_read = bool(self.listeners)
        if len(self._entries) > self._limit:
            self._thin()

    def entries(self) -> list[Entry]:
        """Return the entries to be replayed, in order."""
        if not self._left_out:
            return list(self._entries)
        note = m.Noted(run=self._attached.run, rank=None, text=f"{self._left_out} older displays are left out.")
        return [(note, NO_DESCRIPTORS), *self._entries]

    def attached(self, *, followed: bool) -> m.Attached:
        """Return the description of the run; `followed`: whether another kernel writes to its trackers."""
        elapsed_s = (self.ended_s or time.monotonic()) - self._started_s
        return replace(self._attached, elapsed_s=elapsed_s, trackers=() if followed else self._attached.trackers)

    def close(self) -> None:
        for _, descriptors in self._entries:
            descriptors.close()
        self._entries.clear()

    def _hold_display(self, event: m.Displayed) -> None:
        self._display_bytes += _size_bytes(event)
        while self._display_bytes > MAX_DISPLAY_BYTES:
            index = next(i for i, (old, _) in enumerate(self._entries) if isinstance(old, m.Displayed))
            oldest = self._entries.pop(index)[0]
            assert isinstance(oldest, m.Displayed)
            self._drop_display(oldest)

    def _drop_display(self, event: m.Displayed) -> None:
        self._display_bytes -= _size_bytes(event)
        self._left_out += not event.update

    def _thin(self) -> None:
        half = len(self._entries) // 2
        older, displays = thinned(self._entries[:half])
        self._entries = older + self._entries[half:]
        for event in displays:
            self._drop_display(event)
        self._limit = max(MAX_ENTRIES, 3 * len(older))


def _size_bytes(event: m.Displayed) -> int:
    return sum(map(len, event.data.values()))


def thinned(entries: Sequence[Entry]) -> tuple[list[Entry], list[m.Displayed]]:
    """Return the entries without dispensable events, and the displays that were dropped."""
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
    """Decides which events to keep, from the newest to the oldest."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._lines: Counter[tuple[int, str]] = Counter()
        """Number of lines left out, by rank and stream."""
        self._counts: Counter[Hashable] = Counter()
        self._peaks: dict[int, m.Sampled] = {}
        """The sample with each rank's highest usage, the only one that is kept."""
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
        """Return an event that marks where output was left out."""
        return replace(last, text="", skipped_lines=self._lines[last.rank, last.stream])

    def _number(self, *key: Hashable) -> int:
        """Count one more event of this kind, and return the count."""
        self._counts[key] += 1
        return self._counts[key]

    def _first(self, *key: Hashable) -> bool:
        return self._number(*key, "first") == 1


def _use(event: m.Sampled) -> tuple[int, int]:
    return event.gpu_memory_bytes or 0, event.rss_bytes
