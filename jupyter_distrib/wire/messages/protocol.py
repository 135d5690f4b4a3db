"""The number by which two processes notice that they do not have the same messages. Any process."""

from __future__ import annotations

import os
import pkgutil
import re
from binascii import crc32
from typing import Any

_FIELDS = re.compile(rb"^(?:class \w+|    \w+: .+)", re.MULTILINE)
"""The lines of a source with the classes and their fields."""


def _number() -> int:
    folder, loader = os.path.dirname(__file__), _loader()
    names = sorted(module.name for module in pkgutil.iter_modules([folder]))
    sources = [loader.get_data(os.path.join(folder, f"{name}.py")) for name in names]
    return crc32(b"\n".join(line for source in sources for line in _FIELDS.findall(source)))


def _loader() -> Any:
    """Return the loader of this package, which may lie in an archive."""
    return __spec__.loader


PROTOCOL = _number()
"""Number that differs whenever a class of this folder has other fields; part of the agent's fingerprint. It comes from
the sources, so that a process need not load all of them to know it."""
