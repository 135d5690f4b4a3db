"""The record of a detached run, kept until some kernel asks for it."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from jupyter_distrib.server.client import Client
from jupyter_distrib.server.compaction import Entry, thinned
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.descriptors import NO_DESCRIPTORS, Descriptors

MAX_ENTRIES = 5000
"""Number of entries above which events are left out, by the rules of `compaction.py`, of what is sent again; the logs
have all output."""
MAX_DISPLAY_BYTES = 64 << 20
"""Bytes above which the oldest displays are left out."""


class Journal:
    """A detached run's events in order, with the shared memory that its values lie in."""

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
        self._display_bytes = 0
        self._left_out = 0
        """Number of displays that are gone."""
        self._limit = MAX_ENTRIES
        """Number of entries above which they are compacted; it grows with the entries that have to stay, which are not
        to be looked through at each event."""

    @property
    def ended(self) -> bool:
        return self.ended_s > 0

    def add(self, event: m.Event, fds: tuple[int, ...]) -> None:
        self._entries.append((event, Descriptors.duplicates(fds)))
        if isinstance(event, m.Displayed):
            self._hold_display(event)
        if isinstance(event, m.Ended):
            self.ended_s = time.monotonic()
        if len(self._entries) > self._limit:
            self._thin()

    def entries(self) -> list[Entry]:
        """Return the entries that are sent again, in order."""
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
