"""How a model is spread over ranks: one small file each.

A strategy is a module with `begin(rank: RankInfo) -> None`, called in the rank's main thread before the cell, and
`prepare(rank, *objects)`.
"""

from __future__ import annotations

import importlib
from types import ModuleType


def load(name: str) -> ModuleType:
    """The strategy's module. The kernel has checked the name."""
    return importlib.import_module(f"{__name__}.{name}")
