"""The displays of one rank: figures, HTML, tables, in order, with updates in place.

Part of the fold in `kernel/record/record.py`; kernel side; no thread, no clock. The bundles come from the rank's user
code: this module only stores them, and code that shows them must sanitise them."""

from __future__ import annotations

from dataclasses import replace

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
