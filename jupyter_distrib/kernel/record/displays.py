"""The displays of one rank: figures, HTML, tables, in order, with updates in place; and `clear_output`, which removes
displays and lines.

What a rank prints and what it displays arrive by different routes, so each call of `clear_output` has a number and
arrives twice: as `Cleared` among the displays, and as a code in each stream. With `wait` a call takes effect when
anything new of the rank arrives, by either route.

Part of the fold in `kernel/record/record.py`; kernel side; no thread, no clock. The bundles come from the rank's user
code: this module only stores them, and code that shows them must sanitise them.
"""

from __future__ import annotations

from dataclasses import replace

from jupyter_distrib.kernel.record.output_lines import Lines
from jupyter_distrib.kernel.record.terminal_stream import Fed, Stream
from jupyter_distrib.system.data_class import data_class
from jupyter_distrib.wire import messages as m

KEPT = 100
KEPT_BYTES = 32 << 20


@data_class
class Display:
    """One display: a MIME bundle."""

    data: dict[str, str]
    """MIME type -> content: text as it is, images as base64, JSON types as JSON text."""
    metadata: dict[str, object]
    display_id: str = ""

    @property
    def size_bytes(self) -> int:
        return sum(len(content) for content in self.data.values())


@data_class
class Displays:
    """The newest displays of a rank: at most `KEPT`, and about `KEPT_BYTES`."""

    shown: tuple[Display, ...] = ()
    skipped: int = 0
    """The number of older displays that are no longer kept."""

    def after(self, event: m.Displayed) -> Displays:
        new = Display(data=event.data, metadata=event.metadata, display_id=event.display_id)
        if event.update:
            return replace(self, shown=tuple(new if old.display_id == new.display_id else old for old in self.shown))
        shown = (*self.shown, new)
        first = max(0, len(shown) - KEPT)
        size_bytes = sum(display.size_bytes for display in shown[first:])
        while size_bytes > KEPT_BYTES and first < len(shown) - 1:
            size_bytes -= shown[first].size_bytes
            first += 1
        return Displays(shown=shown[first:], skipped=self.skipped + first)


class RankClearing:
    """The streams of one rank, and its calls of `clear_output`, applied or pending."""

    def __init__(self, rank: int, lines: Lines) -> None:
        self.streams: dict[str, Stream] = {}
        self._rank, self._lines = rank, lines
        self._cleared = 0
        """Number of the last call that has taken effect."""
        self._waiting = 0
        """Number of the pending call that removes the displays when anything new arrives; 0 if there is none."""

    def stream(self, name: str) -> Stream:
        if name not in self.streams:
            self.streams[name] = Stream(self._cleared)
        return self.streams[name]

    def after_output(self, name: str, fed: Fed, displays: Displays) -> Displays:
        """Apply the clearing found in this stream. Return the displays that remain."""
        self._lines.clear(self._rank, name)
        self._apply_clearing(fed.cleared)
        if 0 < self._waiting <= fed.cleared:
            self._waiting = 0
            return Displays()
        return displays

    def after_call(self, event: m.Cleared, displays: Displays) -> Displays:
        """Return the displays that remain after a call."""
        if event.wait and event.number > self._cleared:
            self._waiting = event.number
            return displays
        self._waiting = 0
        self._apply_clearing(event.number)
        return Displays()

    def after_display(self, displays: Displays) -> Displays:
        """Return the displays that remain when a new one arrives."""
        if not self._waiting:
            return displays
        number, self._waiting = self._waiting, 0
        self._apply_clearing(number)
        return Displays()

    def _apply_clearing(self, number: int) -> None:
        self._cleared = max(self._cleared, number)
        for name, stream in self.streams.items():
            if stream.clear(number):
                self._lines.clear(self._rank, name)
