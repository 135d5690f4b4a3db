"""Reads the environment of this process: its variables, without decoding all of them again each time, and the packages
installed. Standard library only."""

from __future__ import annotations

import os
import re
from functools import lru_cache

OWN = tuple(
    {
        os.path.dirname(os.path.dirname(path)) + os.sep
        for path in (os.path.abspath(__file__), (lambda: 0).__code__.co_filename)
    }
)
"""Folders of this package, and the folders that its code names, as tracebacks and frames show them: on a node of a
cluster that is the folder of the machine on which it was compiled, or whatever name it was compiled with."""


def variables() -> dict[str, str]:
    """Return the content of `os.environ`. Every cell asks for it, in the kernel and on each rank, and decoding it all
    takes a tenth of what a cell may cost."""
    raw = getattr(os.environ, "_data", None)  # where CPython keeps it as the system gave it
    return dict(os.environ) if raw is None else dict(_decoded(tuple(raw.items())))


def version(package: str) -> str:
    """Return the installed version of a package, or an empty string."""
    import importlib.metadata  # with all that it needs it takes longer than the rest of an agent

    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
    text = distribution.read_text("METADATA") or ""  # `version` would parse all of it as a mail, and torch's is long
    found = re.search(r"^Version: *(\S+)", text, re.MULTILINE)
    return found[1] if found else distribution.version


@lru_cache(maxsize=1)
def _decoded(raw: tuple[tuple[bytes, bytes], ...]) -> dict[str, str]:
    return {os.fsdecode(name): os.fsdecode(value) for name, value in raw}
