"""The code and style sheets that draw runs in a page: for the live view, and for the pages of JupyterLab, which get it
from the kernel whose runs they show. Kernel side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

_STATIC = Path(__file__).parent / "static"
_CHARTS = ("say.js", "dom.js", "words.js", "mean.js", "chart.js", "charts.js", "heat.js")
RUN = (
    *_CHARTS, "lines.js", "state.js", "styles.js", "strips.js", "tools.js", "output.js", "displays.js", "ranks.js",
    "run.js", "output.css", "run.css", "charts.css", "strips.css",
)  # fmt: skip
"""The live view of a run."""
PAGE = (*_CHARTS, "output.css", "charts.css")
"""Charts and tables of rank and time, for pages."""

SWEEP = (*_CHARTS, "sweep.js", "output.css", "run.css", "charts.css", "sweep.css")
"""The live view of a sweep."""


def script(names: Sequence[str]) -> str:
    """Return these files as a single module, without their imports of one another."""
    lines = (line for name in names if name.endswith(".js") for line in _text(name).splitlines())
    return "\n".join(line for line in lines if not line.startswith("import "))


def style(names: Sequence[str]) -> str:
    """Return these style sheets as one."""
    return "\n".join(_text(name) for name in names if name.endswith(".css"))


def of_pages() -> dict[str, str]:
    """Return code and style sheet for the pages of JupyterLab."""
    return {"script": script(PAGE), "style": style(PAGE)}


def _text(name: str) -> str:
    return (_STATIC / name).read_text("utf-8")
