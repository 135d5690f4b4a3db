"""The calls that a library makes before the end of a cell is reported: what goes on in the background has to be over.
Rank's main thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class EndOfCell(Protocol):
    """A function to call at the end of a cell."""

    def __call__(self, *, ok: bool) -> None: ...


_calls: list[Callable[..., None]] = []


def call(function: EndOfCell) -> None:
    """Call a function once at the end of this cell. If the cell has ended well, with `ok`: it may wait and raise."""
    _calls.append(function)


def run(*, ok: bool) -> None:
    """Make the calls."""
    calls = [*_calls]
    _calls.clear()
    for each in calls:
        each(ok=ok)
