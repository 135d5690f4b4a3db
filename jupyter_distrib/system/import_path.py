"""The folders of `sys.path` in which Python looks for modules. Any thread; standard library only.

Python ignores entries that are not strings, such as the None of `sys.path.append(os.environ.get("PROJECT_ROOT"))`. Much
else raises an exception for them, `importlib.metadata` of the standard library, too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import importlib.metadata


def folders() -> tuple[str, ...]:
    """Return the entries that are strings."""
    entries: Iterable[object] = sys.path
    return tuple(each for each in entries if isinstance(each, str))


def distribution(name: str) -> importlib.metadata.Distribution:
    """Return an installed package, as `importlib.metadata.distribution` does. Raises `PackageNotFoundError`."""
    import importlib.metadata  # takes longer than the import of the rest of an agent

    for each in importlib.metadata.distributions(name=name, path=list(folders())):
        return each
    raise importlib.metadata.PackageNotFoundError(name)
