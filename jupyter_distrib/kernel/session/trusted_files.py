"""The project files that the user trusts to name interpreters, commands and addresses. They are remembered by path and
content in the user's own file, so that the user is asked once about each. Kernel side."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from jupyter_distrib.kernel.settings.settings import ProjectFile
from jupyter_distrib.system import paths


def is_trusted(file: ProjectFile) -> bool:
    """Return whether the user has trusted this content of the file."""
    return _read().get(file.path) == file.digest


def trust(file: ProjectFile) -> None:
    """Remember this content of the file as trusted, in place of an earlier content."""
    path = _path()
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps({**_read(), file.path: file.digest}, indent=1), "utf-8")
    temporary.replace(path)


def _path() -> Path:
    return paths.state_directory() / "trusted_files.json"


def _read() -> dict[str, str]:
    with suppress(OSError, ValueError):
        content = json.loads(_path().read_text("utf-8"))
        return content if isinstance(content, dict) else {}
    return {}
