"""The end of data loaders that a cell leaves behind. Rank's main thread."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from jupyter_distrib.worker.pytorch import private


def end_loaders(values: Iterable[object]) -> None:
    """End the persistent workers of data loaders; another iteration would start them again.

    A loader that is freed by the garbage collector waits 5 s for each worker: their signal to end is finalized first
    (measured with torch 2.13)."""
    data = sys.modules.get("torch.utils.data")
    if data is None:
        return
    for value in values:
        if isinstance(value, data.DataLoader):
            private.end_workers(value)
