"""The facts about tqdm: on a rank the bars of its notebook module become terminal bars, whose text the kernel reads.

The widgets of `tqdm.notebook` would have no kernel for their models.
"""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

from jupyter_distrib.libraries.library import Library
from jupyter_distrib.system.data_class import data_class


@data_class
class Bar:
    """The parsed content of a progress bar."""

    label: str
    step: float
    total: float | None
    rate: float | None
    """The number of steps per second; None while unknown."""
    unit: str
    detail: str
    """The postfix: `loss=0.3`."""


def parse_bar(text: str) -> Bar | None:
    """Parse tqdm's default format, including its shorter forms under a narrow `ncols` or a shorter `bar_format`."""
    if len(text) > 1000 or ("%|" not in text and " [" not in text):
        return None
    text = text.strip()
    match = _WITH_TOTAL.fullmatch(text) or _WITHOUT_TOTAL.fullmatch(text)
    if match is None:
        return None
    part = match.groupdict()
    rest = (part["rest"] or "").removesuffix("]").removeprefix(",").split(", ", 1)
    rate, unit = _rate(rest[0])
    percent = part.get("percent")
    step = _scaled(part["step"]) if part["step"] else float(percent or 0)
    total = _scaled(part["total"]) if part.get("total") else (100.0 if percent and not part["step"] else None)
    if max(step, total or 0.0) > _MOST:
        return None
    return Bar(
        label=(part["label"] or "").strip(),
        step=step,
        total=total,
        rate=rate if rate is not None and 1 / _MOST < rate < _MOST else None,
        unit=unit or (part.get("unit") or "it").strip(),
        detail=rest[1].strip() if len(rest) > 1 else "",
    )


_MOST = 1e15
"""The largest number of a bar. Any text may look like one, and no view can draw infinity."""
_NUMBER = r"\d+(?:\.\d+)?(?:e[+-]?\d+)?[kMGTPEZY]?"
_WITH_TOTAL = re.compile(
    rf"(?P<label>.*?):?\s*(?P<percent>\d+)%\|[^|]*\|"
    rf"(?:\s*(?P<step>{_NUMBER})/(?P<total>{_NUMBER})\S*(?:\s*\[(?P<times>[^<\]]*<[^,\]]*)(?P<rest>.*))?)?"
)
_WITHOUT_TOTAL = re.compile(
    rf"(?:(?P<label>.*): )?(?P<step>{_NUMBER})(?P<unit>[^\d\[]*) \[(?P<times>\d+:[\d:]+)(?P<rest>,.*\])"
)
_RATE = re.compile(rf"\s*(?P<number>{_NUMBER})(?P<unit>.*?)/(?P<per>.+)")
_SCALE = {letter: 1000.0**power for power, letter in enumerate("kMGTPEZY", start=1)}


def _rate(text: str) -> tuple[float | None, str]:
    """Parse a rate: `33.1it/s`, or `2.5s/it` for less than one step per second."""
    match = _RATE.fullmatch(text)
    if match is None:
        return None, ""
    number = _scaled(match["number"])
    if match["per"] == "s":
        return number, match["unit"].strip()
    return (1 / number if number else None), match["per"].strip()


def _scaled(number: str) -> float:
    return float(number[:-1]) * _SCALE[number[-1]] if number[-1] in _SCALE else float(number)


def _replace_bars(module: ModuleType) -> None:
    from tqdm import tqdm  # type: ignore[import-untyped]  # it is installed: its notebook module is being imported

    class TerminalBar(tqdm):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            keywords.pop("display", None)
            if isinstance(keywords.get("ncols"), str):  # `100%` of a browser's window
                del keywords["ncols"]
            super().__init__(*arguments, **keywords)

    TerminalBar.__module__, TerminalBar.__qualname__ = module.__name__, "tqdm_notebook"  # by this name it is pickled
    module.__dict__.update(tqdm=TerminalBar, tqdm_notebook=TerminalBar)


TQDM = Library(
    modules=("tqdm",),
    stays={"tqdm.std:tqdm": "a bar belongs to the notebook's page: make it in the cell, `tqdm(...)`"},
    mend={"tqdm.notebook": _replace_bars},
)
