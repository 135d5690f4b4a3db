"""Replaces functions of torch for the duration of a run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class Patches:
    """Replacements that are undone together."""

    def __init__(self) -> None:
        self._made: list[tuple[Any, str, Any, Any]] = []

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace `owner.name` by the function that `make` returns for the original."""
        original = getattr(owner, name)
        self.put(owner, name, functools.wraps(original)(make(original)))

    def put(self, owner: Any, name: str, replacement: Any) -> None:
        """Replace `owner.name`."""
        self._made.append((owner, name, getattr(owner, name), replacement))
        setattr(owner, name, replacement)

    def undo(self) -> None:
        """Restore the originals, except for functions that the cell itself has replaced meanwhile."""
        while self._made:
            owner, name, original, replacement = self._made.pop()
            if getattr(owner, name) is replacement:
                setattr(owner, name, original)
