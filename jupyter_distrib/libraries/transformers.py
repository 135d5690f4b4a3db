"""The facts about transformers, whose models declare the classes of their blocks."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from jupyter_distrib.libraries.library import Library


def _repeated_blocks(model: Any) -> Collection[str]:
    return getattr(model, "_no_split_modules", None) or ()


TRANSFORMERS = Library(modules=("transformers",), extra="transformers", repeated_blocks=_repeated_blocks)
