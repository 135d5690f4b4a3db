"""The filters of `warnings`, as a row of the table in `libraries/settings.py`. Standard library only.

Python, libraries and the kernel have filters of their own, which exist on ranks too: filters with actions and
categories that only they use, and with known messages and modules, are left out.
"""

from __future__ import annotations

import builtins
import re
import warnings
from functools import partial
from typing import Any

from jupyter_distrib.libraries.setting import LibrarySetting, when_imported

_OF_PYTHON = {
    ("ignore", each) for each in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)
}
"""Python's default filters."""
_OF_LIBRARIES = ("numpy.", "torch::", ".*Trio's signal handling code", "the matrix subclass is not")
"""Prefixes of the messages that numpy, torch and scipy filter at import, and ipykernel at its start."""
_OF_KERNEL = ("IPython", "ipykernel", "torch", "numpy")
"""Libraries whose categories only they filter themselves."""
_set: list[Any] = []
"""The filters that this process has taken over from another process."""


def _read(_: Any) -> list[list[Any]] | None:
    """Return the filters that users set: action, message, category, module and line of each."""
    found = []
    for action, message, category, module, line in warnings.filters:
        if not isinstance(category, type) or (action, category) in _OF_PYTHON:
            continue
        text, where = _text(message), _text(module)
        if text.startswith(_OF_LIBRARIES):
            continue
        pythons = getattr(builtins, category.__name__, None) is category
        top = category.__module__.partition(".")[0]
        by_library = action in ("always", "default") or top in (*_OF_KERNEL, "__main__")
        if (pythons and not where) or (where != "__main__" and not by_library):
            found.append([action, text, category.__name__ if pythons else _path(category), where, line])
    return found or None


def _text(pattern: Any) -> str:
    return str(getattr(pattern, "pattern", pattern) or "")


def _path(category: type) -> str:
    return f"{category.__module__}:{category.__qualname__}"


def _write(_: Any, value: list[list[Any]] | None) -> None:
    for old in _set:
        if old in warnings.filters:
            warnings.filters.remove(old)  # type: ignore[attr-defined]
    _set.clear()
    for action, text, path, where, line in reversed(value or []):
        home, _, name = path.rpartition(":")
        key = f"the warning filter {action} {path}"
        when_imported(home or "builtins", key, partial(_add, (action, text, name, where, line)))


def _add(wanted: tuple[Any, str, str, str, int], home: Any) -> None:
    action, text, name, where, line = wanted
    category = getattr(home, name)
    warnings.filterwarnings(action, text, category, where, line)
    message, module = re.compile(text, re.IGNORECASE) if text else None, re.compile(where) if where else None
    _set.append((action, message, category, module, line))


WARNINGS = LibrarySetting(name="warnings", library="warnings", read=_read, write=_write)
