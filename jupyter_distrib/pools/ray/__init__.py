"""Ranks on the nodes of a Ray cluster. All code that uses Ray is in this folder."""

import importlib.util
from collections.abc import Mapping


def usable(options: Mapping[str, str]) -> bool:
    """Return whether a pool with these options can be reached at all."""
    return importlib.util.find_spec("ray") is not None
