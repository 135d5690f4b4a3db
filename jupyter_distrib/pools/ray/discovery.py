"""Finds the addresses of Ray clusters: RAY_ADDRESS, and the file in which the Ray of this machine keeps its address.
Connects to nothing."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress

from jupyter_distrib.errors import PoolError
from jupyter_distrib.pools.discovery import Found, pool_name
from jupyter_distrib.pools.ray.cluster import resolve
from jupyter_distrib.system import record_file
from jupyter_distrib.system.record_file import DamagedFile

_FILE = "ray/ray_current_cluster"
"""The file below Ray's temporary folder; `ray._private.utils.read_ray_address` (Ray 2.60) reads it."""


def found() -> list[Found]:
    """Return a pool for each address."""
    every: dict[str, str] = {}
    for text, origin in _addresses():
        with suppress(PoolError):
            every.setdefault(resolve(text).shown, origin)
    return [
        Found(
            kind="ray",
            name=pool_name("ray-cluster", "ray"),
            text=f"Ray: {address} ({origin})",
            options={"address": address},
        )
        for address, origin in every.items()
    ]


def _addresses() -> Iterator[tuple[str, str]]:
    if (given := os.environ.get("RAY_ADDRESS", "")) not in ("", "auto"):
        yield given, "RAY_ADDRESS"
    folder = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    for path in dict.fromkeys((f"{folder}/{_FILE}", f"/tmp/{_FILE}")):  # noqa: S108 - Ray's own folder
        with suppress(OSError, DamagedFile, ValueError):  # another user's file is not trusted
            if text := record_file.text_of(path, 1000).strip():
                yield text, path
