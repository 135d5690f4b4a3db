"""Ranks in a Spark application of their own, through Ray on Spark."""

import importlib.util
from collections.abc import Mapping


def usable(options: Mapping[str, str]) -> bool:
    """Return whether a pool with these options can be reached at all."""
    return all(importlib.util.find_spec(name) is not None for name in ("pyspark", "ray"))
