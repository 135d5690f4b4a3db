"""The displays and lines that a rank takes back with `clear_output`. Kernel side; part of the fold in
`kernel/record/record.py`.

What a rank prints and what it displays come on different ways, so each call has a number and comes twice: as `Cleared`
among the displays, and as a code in each stream. With `wait` a call takes effect when anything new of the rank comes,
on whichever way.
"""

from __future__ import annotations

from jupyter_distrib.kernel.record.displays import Displays
from jupyter_distrib.kernel.record.output_lines import Lines
from jupyter_distrib.kernel.record.terminal_stream import Fed, Stream
from jupyter_distrib.wire import messages as m


class RankClearing:
    """The streams of one rank, and the calls of `clear_output` that have taken effect or wait."""

    def __init__(self, rank: int, lines: Lines) -> None:
        self.streams: dict[str, Stream] = {}
        self._rank, self._lines = rank, lines
        self._cleared = 0
        """The number of the last call that has taken effect."""
        self._waiting = 0
        """The number of the call at which the displays go when anything new comes; 0 if there is none."""

    def stream(self, name: str) -> Stream:
        if name not in self.streams:
            self.streams[name] = Stream(self._cleared)
        return self.streams[name]

    def fed(self, name: str, fed: Fed, displays: Displays) -> Displays:
        """Let go what a call in this stream has cleared. Return the displays that stay."""
        self._lines.clear(self._rank, name)
        self._take_effect(fed.cleared)
        if 0 < self._waiting <= fed.cleared:
            self._waiting = 0
            return Displays()
        return displays

    def called(self, event: m.Cleared, displays: Displays) -> Displays:
        """Return the displays that stay at a call."""
        if event.wait and event.number > self._cleared:
            self._waiting = event.number
            return displays
        self._waiting = 0
        self._take_effect(event.number)
        return Displays()

    def displayed(self, displays: Displays) -> Displays:
        """Return the displays that stay when there is a new one."""
        if not self._waiting:
            return displays
        number, self._waiting = self._waiting, 0
        self._take_effect(number)
        return Displays()

    def _take_effect(self, number: int) -> None:
        self._cleared = max(self._cleared, number)
        for name, stream in self.streams.items():
            if stream.clear(number):
                self._lines.clear(self._rank, name)
