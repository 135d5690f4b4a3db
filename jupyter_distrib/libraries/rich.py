"""The facts about rich. A console has locks and what it is showing; a rank makes one with the same settings, except a
theme."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from typing import Any

from jupyter_distrib.libraries.library import Library

_PLAIN = (bool, int, float, str, type(None))


def _console(console: Any) -> tuple[Any, ...]:
    if console.file not in (sys.stdout, sys.stderr):
        raise pickle.PicklingError("the console writes to a file of the notebook")
    settings = {name: value for name, value in vars(console).items() if type(value) in _PLAIN}
    return make_console, (type(console), settings)


def make_console(cls: Callable[[], Any], settings: dict[str, Any]) -> Any:
    """Return a new console with these settings."""
    made = cls()
    vars(made).update(settings)
    return made


RICH = Library(modules=("rich",), sent={"rich.console:Console": _console})
