"""The settings file of a project, as a user trusts it."""

from __future__ import annotations

import hashlib
from pathlib import Path

from jupyter_distrib.kernel.settings import find_files


def write_trusted(folder: Path, text: str) -> None:
    """Write the project's file of a folder, and trust it as `%distributed_pool trust` does."""
    path = folder / "jupyter_distrib.toml"
    path.write_text(text)
    find_files.trust(str(path), hashlib.sha256(text.encode()).hexdigest())
