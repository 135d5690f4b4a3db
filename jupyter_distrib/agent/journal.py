"""The record of a detached run, kept until some kernel asks for it."""

from __future__ import annotations

import os
import time

from jupyter_distrib.agent.client import Client
from jupyter_distrib.events import Attached, Displayed, Ended, Event, Execute, Progressed, Sampled, Wrote

MAX_ENTRIES = 5000
"""Past this, old output and progress are left out of what is sent again; the logs have all output."""
MAX_DISPLAY_BYTES = 64 << 20
"""Past this, the oldest displays are left out."""


class Journal:
    """A detached run's events in order, with the shared memory that its values lie in."""

    def __init__(self, command: Execute, world_size: int, *, gpus: bool, notebook: str) -> None:
        self._command, self._world_size, self._gpus = command, world_size, gpus
        self.notebook = notebook
        self._entries: list[tuple[Event, tuple[int, ...]]] = []
        self._started_s, self._started_wall_s = time.monotonic(), time.time()
        self.listeners: list[Client] = []
        """The kernels that follow it."""
        self.ended_s = 0.0
        self._display_bytes = 0

    @property
    def ended(self) -> bool:
        return self.ended_s > 0

    def add(self, event: Event, fds: tuple[int, ...]) -> None:
        self._entries.append((event, tuple(os.dup(fd) for fd in fds)))
        if isinstance(event, Displayed):
            self._hold_display(event)
        if isinstance(event, Ended):
            self.ended_s = time.monotonic()
        if len(self._entries) > MAX_ENTRIES:
            self._thin()

    def entries(self) -> list[tuple[Event, tuple[int, ...]]]:
        return list(self._entries)

    def attached(self) -> Attached:
        return Attached(
            run=self._command.run,
            label=self._command.label,
            ranks=self._command.ranks,
            world_size=self._world_size,
            gpus=self._gpus,
            strategy=self._command.setting.strategy,
            started_wall_s=self._started_wall_s,
            elapsed_s=(self.ended_s or time.monotonic()) - self._started_s,
        )

    def close(self) -> None:
        for _, fds in self._entries:
            for fd in fds:
                os.close(fd)
        self._entries.clear()

    def _hold_display(self, event: Displayed) -> None:
        self._display_bytes += _size_bytes(event)
        while self._display_bytes > MAX_DISPLAY_BYTES:
            index = next(i for i, (old, _) in enumerate(self._entries) if isinstance(old, Displayed))
            oldest = self._entries.pop(index)[0]
            assert isinstance(oldest, Displayed)
            self._display_bytes -= _size_bytes(oldest)

    def _thin(self) -> None:
        half = len(self._entries) // 2
        peaks: dict[int, Sampled] = {}
        """By rank, the one that is worth keeping of many samples."""
        for event, _ in self._entries[:half]:
            if isinstance(event, Sampled) and (event.rank not in peaks or _use(event) > _use(peaks[event.rank])):
                peaks[event.rank] = event
        kept = {id(event) for event in peaks.values()}
        older = [
            entry
            for entry in self._entries[:half]
            if id(entry[0]) in kept or not isinstance(entry[0], (Wrote, Progressed, Sampled))
        ]
        self._entries = older + self._entries[half:]


def _size_bytes(event: Displayed) -> int:
    return sum(map(len, event.data.values()))


def _use(event: Sampled) -> tuple[int, int]:
    return event.gpu_memory_bytes or 0, event.rss_bytes
