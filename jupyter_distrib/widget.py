"""The live view of a run in the cell that started it: text, drawn anew in place a few times a second. Runs in the
thread that waits for the run.

Nothing appears before there is something to see. What is left at the end is what the saved notebook holds.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from IPython.core.getipython import get_ipython
from IPython.display import display

from jupyter_distrib import view
from jupyter_distrib.pools import ECHOING
from jupyter_distrib.record import RunRecord

DRAW_EVERY_S = 0.15
"""At most this often; the first time at once."""
TICK_S = 1.0
"""Without news: how often the elapsed time is drawn anew."""


class LiveView:
    """Call it whenever something may have changed; see `run.Watch`."""

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._silent = pool in ECHOING
        self._handle: Any = None
        self._next_s = 0.0
        self._changes = -1
        self._text = ""
        self._streamed = 0
        shell = get_ipython()
        self._in_kernel = shell is not None and hasattr(shell, "kernel")

    def __call__(self, record: RunRecord, elapsed_s: float) -> float:
        if self._silent:
            return TICK_S
        now = time.monotonic()
        if not record.ended and now < self._next_s:
            return self._next_s - now if record.changes != self._changes else TICK_S
        if self._in_kernel:
            self._draw(record, elapsed_s)
        else:
            self._stream(record, elapsed_s)
        self._changes = record.changes
        self._next_s = now + DRAW_EVERY_S
        return TICK_S

    def _draw(self, record: RunRecord, elapsed_s: float) -> None:
        text = view.as_text(record, elapsed_s, self._pool)
        if not text or text == self._text:
            return
        self._text = text
        if self._handle is None:
            self._handle = display(  # type: ignore[no-untyped-call]  # IPython has no types here
                {"text/plain": text}, raw=True, display_id=True
            )
        else:
            self._handle.update({"text/plain": text}, raw=True)

    def _stream(self, record: RunRecord, elapsed_s: float) -> None:
        """In a plain terminal nothing can be drawn over: lines as they come, and the rest at the end."""
        lines, self._streamed = view.stream_lines(record, self._streamed)
        if record.ended and self._streamed != 0:
            lines.append(view.header(record, elapsed_s, self._pool))
        for line in lines:
            print(line, file=sys.stdout)
