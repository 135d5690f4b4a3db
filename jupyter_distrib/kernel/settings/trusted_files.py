"""The files of projects that the user trusts. They are remembered by path and content in the user's own folder, so that
the user is asked once about each content. Kernel side."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from jupyter_distrib.errors import PoolError
from jupyter_distrib.system import paths, record_file
from jupyter_distrib.system.record_file import DamagedFile


def is_trusted(path: str, digest: str) -> bool:
    """Return whether the user has trusted this content of the file."""
    return _read().get(path) == digest


def trust(path: str, digest: str) -> None:
    """Remember this content of the file as trusted, in place of an earlier content. Raises `OSError`, `PoolError`."""
    paths.write_whole(_path(), json.dumps({**_read(), path: digest}, indent=1))


def state() -> tuple[int, int, int] | None:
    """Return a key for what is trusted at present: it differs when that has changed."""
    with suppress(OSError, PoolError):
        info = os.lstat(_path())
        return info.st_ino, info.st_mtime_ns, info.st_size
    return None


def _path() -> Path:
    return paths.state_directory() / "trusted_files.json"


def _read() -> dict[str, str]:
    """Return the digests by path; none of a damaged file: then the user is asked again."""
    with suppress(OSError, PoolError, DamagedFile):
        content = record_file.json_of(record_file.text_of(_path()))
        if isinstance(content, dict):
            return {path: digest for path, digest in content.items() if isinstance(digest, str)}
    return {}
