"""Saved runs for front ends, as JSON can carry them: a list, and several beside one another. Kernel side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jupyter_distrib.kernel.history import run_files
from jupyter_distrib.kernel.history.listing import SHOWN, Comparison, matching, points
from jupyter_distrib.kernel.history.saved_run import thinned

POINTS = 300
"""The number of points of one line in a chart."""


def listed(words: str) -> dict[str, Any]:
    """Return the newest saved runs in which all of these words stand, and the number of further ones."""
    found = matching(run_files.load(), words.split())
    return {"saved": found.as_dicts(), "more": max(0, len(found) - SHOWN)}


def compared(names: Sequence[str]) -> dict[str, Any]:
    """Return what differs between saved runs, by their numbers. Raises `DistributedError`."""
    comparison = Comparison(tuple(run_files.find(name) for name in names))
    lines: dict[str, list[dict[str, Any]]] = {}
    for run in comparison:
        for name, each in points(run):
            lines.setdefault(name, []).append({"run": run.number, "points": thinned(each, POINTS)})
    table = comparison.table()
    return {
        "comparison": {
            "head": table.head,
            "rows": table.rows,
            "charts": [{"name": name, "lines": each} for name, each in lines.items()],
            "code": list(comparison.code()),
        }
    }
