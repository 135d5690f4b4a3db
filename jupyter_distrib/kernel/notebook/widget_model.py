"""The widget that shows a run in the browser: an anywidget whose state is the pieces of `kernel/views/state.py`.
Kernel side.

Imported when the first run is long enough to be watched, because it imports anywidget and ipywidgets. Its methods are
called in the thread that shows the run; `get_state` also in the thread that answers a browser that was reloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import anywidget
import traitlets

from jupyter_distrib.kernel.views import page_code


def answer_during_cells(widget: anywidget.AnyWidget) -> None:
    """Let this widget answer the browser also while a cell runs; called after each state is sent.

    ipykernel 7.4 passes messages to the thread that published last, which is the one that runs the cell: a press of
    Stop would wait for the end of the cell.
    """
    widget.comm.__dict__.pop("_reply_subshell_id", None)


class RunWidget(anywidget.AnyWidget):
    """The widget of one run. The browser keeps the pieces as plain attributes of the model, so that a view which is
    still being loaded loses none of them."""

    layout = traitlets.Any(None).tag(sync=True)  # else each run would have a second model
    _esm = page_code.script(page_code.RUN)
    _css = page_code.style(page_code.RUN)

    def __init__(self, pieces: Callable[[], dict[str, Any]], on_request: Callable[[dict[str, Any]], object]) -> None:
        self._pieces = pieces
        super().__init__()
        self.on_msg(lambda _, content, buffers: on_request(content))

    def get_state(self, key: Any = None, drop_defaults: bool = False) -> dict[str, Any]:
        """Return the state, including the pieces, as ipywidgets does: all of it for None, else the named keys."""
        pieces = self._pieces()
        if key is None:
            return {**super().get_state(None, drop_defaults), **pieces}
        keys = {key} if isinstance(key, str) else set(key)
        state = {name: pieces[name] for name in keys & pieces.keys()}
        return {**super().get_state(keys - pieces.keys(), drop_defaults), **state} if keys - pieces.keys() else state

    def push(self, changed: Iterable[str]) -> None:
        """Send these pieces to the browser."""
        self.send_state(set(changed))
        answer_during_cells(self)
