"""Reads standard output and error of one rank, also of processes of earlier runs that still write. Runs in the agent's
loop."""

from __future__ import annotations

import codecs
import os
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from jupyter_distrib.agent.ranks.output import Pipe
from jupyter_distrib.system.event_loop import Loop
from jupyter_distrib.wire.descriptors import Descriptors

NAMES = ("stdout", "stderr")
STRAY_AFTER_S = 1.5
"""Seconds after a cell during which output may come from its cleanup."""
TakeData: TypeAlias = Callable[[str, bytes], None]
"""Callback for data, with the name of its stream."""
TakeLateText: TypeAlias = Callable[[str, str, str], None]
"""Callback for late text, with its run and the name of its stream."""


class RankStreams:
    """The pipes into which one rank, and what it starts, write.

    Args:
        on_data: Takes what the rank writes.
        on_late_text: Takes the output of processes left by an earlier run.
    """

    def __init__(self, loop: Loop, *, on_data: TakeData, on_late_text: TakeLateText) -> None:
        self._loop, self._on_data, self._on_late_text = loop, on_data, on_late_text
        ends = {name: os.pipe() for name in NAMES}
        self.write_ends = [write_fd for _, write_fd in ends.values()]
        """Write ends for the process, in the order of `NAMES`; the starter of the process closes them."""
        self._pipes = {name: self._pipe(name, read_fd) for name, (read_fd, _) in ends.items()}
        self._late_pipes: list[Pipe] = []
        self._ended_at_s = float("inf")
        self._has_stray = False

    @property
    def stderr_tail(self) -> bytes:
        return bytes(self._pipes["stderr"].tail)

    def drain(self) -> None:
        """Read all output of the rank so far."""
        for pipe in self._pipes.values():
            pipe.drain()

    def begin_run(self) -> None:
        """Read earlier output before a cell begins, so that a crash report does not quote lines of earlier cells."""
        for pipe in self._pipes.values():
            pipe.drain()
            pipe.tail.clear()

    def end_run(self) -> None:
        """Record that a cell has ended."""
        self._ended_at_s = time.monotonic()

    def note_idle_output(self) -> None:
        """Record that an idle rank has written something: code of a cell is still running, in C or bypassing
        `sys.stdout`."""
        self._has_stray = self._has_stray or time.monotonic() > self._ended_at_s + STRAY_AFTER_S

    def pop_stray(self) -> bool:
        """Return once whether the rank has written while idle, and so may write during the next cell."""
        has, self._has_stray = self._has_stray, False
        return has

    def assign_to(self, run: str) -> None:
        """Treat output from now on as late output of that run."""
        for name, pipe in self._pipes.items():
            pipe.on_data = self._late(run, name)

    def replace(self, run: str, read_ends: Sequence[int]) -> None:
        """Read the rank's new pipes, and treat output through the old ones as late output of that run. Duplicates the
        descriptors; if there are none, the rank could open no new pipes and continues with the old ones.

        Raises:
            OSError: The agent may open no more files.
        """
        self.drain()
        if not read_ends:
            for name, pipe in self._pipes.items():
                pipe.on_data = self._here(name)
            return
        fds = Descriptors.duplicates(read_ends).take()
        self._late_pipes = [pipe for pipe in (*self._late_pipes, *self._pipes.values()) if not pipe.closed]
        self.assign_to(run)
        self._pipes = {name: self._pipe(name, fd) for name, fd in zip(NAMES, fds, strict=True)}

    def close(self) -> None:
        for pipe in (*self._pipes.values(), *self._late_pipes):
            pipe.close()

    def _pipe(self, name: str, read_fd: int) -> Pipe:
        return Pipe(self._loop, read_fd, self._here(name))

    def _here(self, name: str) -> Callable[[bytes], None]:
        return lambda data: self._on_data(name, data)

    def _late(self, run: str, name: str) -> Callable[[bytes], None]:
        decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        return lambda data: self._on_late_text(run, name, decoder.decode(data))
