"""Real control groups with a limit of memory, of the version that this system has."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.processes import wait_until

_MOUNTS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))
_LIMITS = ("memory.limit_in_bytes", "memory.max")


@contextmanager
def memory_group(name: str, limit_bytes: int) -> Iterator[Path]:
    """The folder of a control group with this limit, whose processes have to end; skips where the system forbids it."""
    mount = next((each for each in _MOUNTS if (each / "cgroup.procs").exists()), None)
    if mount is None:
        pytest.skip("no control groups are mounted")
    folder = mount / f"{name}-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"this system lets nobody make control groups: {error}")
    try:
        limits = [folder / each for each in _LIMITS if (folder / each).exists()]
        if not limits:
            pytest.skip("control groups limit no memory here")
        limits[0].write_text(str(limit_bytes))
        yield folder
        assert wait_until(lambda: not members(folder), 20), members(folder)
    finally:
        for pid in members(folder):  # of a test that has failed
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not members(folder), 10)
        folder.rmdir()


def members(folder: Path) -> list[int]:
    """The processes in a control group."""
    return list(map(int, (folder / "cgroup.procs").read_text().split()))
