"""The rank of a run that logs to experiment trackers: a variable names it, unless the cell has `--track none`."""

from __future__ import annotations

import os

RANK_VARIABLE = "JUPYTER_DISTRIB_TRACKING_RANK"
"""Environment variable with the number of the rank that logs."""


def is_silent() -> bool:
    """Return whether a rank other than this one logs."""
    chosen = os.environ.get(RANK_VARIABLE)
    return chosen is not None and os.environ.get("RANK") != chosen
