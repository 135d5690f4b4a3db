"""Callbacks that run before the end of a cell is reported, for instance to wait for background work. Rank's main
thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class EndOfCell(Protocol):
    """A callback for the end of a cell."""

    def __call__(self, *, ok: bool) -> None: ...


_registered: list[Callable[..., None]] = []


def register(function: EndOfCell) -> None:
    """Call a function once at the end of this cell. With `ok`, the cell has ended well, and the function may wait and
    raise."""
    _registered.append(function)


def run_registered(*, ok: bool) -> None:
    """Call the registered functions, each once."""
    calls = [*_registered]
    _registered.clear()
    for each in calls:
        each(ok=ok)
