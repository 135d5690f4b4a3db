"""The widget that shows a run in the browser: an anywidget whose state is the pieces of `kernel/views/state.py`.
Kernel side.

Imported when the first run is long enough to be watched, because it imports anywidget and ipywidgets. Its methods are
called in the thread that shows the run; `get_state` also in the thread that answers a browser that was reloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from jupyter_distrib.kernel import views

_STATIC = Path(views.__file__).parent / "static"
_MODULES = (
    "say.js", "dom.js", "words.js", "lines.js", "state.js", "mean.js", "chart.js", "charts.js", "styles.js",
    "strips.js", "tools.js", "output.js", "displays.js", "ranks.js", "run.js",
)  # fmt: skip


def bundle() -> str:
    """Return the view as the single module that anywidget expects: all files, without their imports of one another."""
    lines = (line for name in _MODULES for line in (_STATIC / name).read_text("utf-8").splitlines())
    return "\n".join(line for line in lines if not line.startswith("import "))


class RunWidget(anywidget.AnyWidget):
    """The widget of one run. The browser keeps the pieces as plain attributes of the model, so that a view which is
    still being loaded loses none of them."""

    layout = traitlets.Any(None).tag(sync=True)  # else each run would have a second model
    _esm = bundle()
    _css = "\n".join((_STATIC / name).read_text("utf-8") for name in ("output.css", "run.css", "strips.css"))

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
        # ipykernel 7.4 takes what the browser sends on this comm to the thread that published on it last, which is the
        # one that runs the cell. Without this note a press of Stop would wait for the end of the cell.
        self.comm.__dict__.pop("_reply_subshell_id", None)
