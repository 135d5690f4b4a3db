"""Requests for nodes that Slurm may have got and nobody holds: each has a job name of its own to cancel it by.

A controller that is frozen or slow gets a request after its salloc was given up, and makes a job of it. The name of a
request is in a file until it is certain that no job has it: the next coordinator on this machine cancels by the names
that are left. Blocks, in the thread of `acquire` or in one of its own.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

from jupyter_distrib.system import paths, record_file

ANSWER_S = 20.0
AGAIN_S = 5.0
LARGEST_BYTES = 10_000
SETTLE_S = 60.0
"""Seconds for which a request may still arrive when the controller answers again; Slurm's messages time out sooner."""
_NAME = re.compile(r"[^\0]+ [0-9a-f]{8}")
"""The name of a request, which ends in a random number: nothing else is cancelled."""


class Request:
    """One request, from just before it is sent until no job has its name. Its file is locked by the process that has
    it, so that it is known to be left when that process has ended."""

    def __init__(self, title: str) -> None:
        self.name = f"{title} {secrets.token_hex(4)}"
        self._path = _folder() / secrets.token_hex(8)
        self._file = paths.opened(self._path)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._file.write(f"{_cluster()}\n{self.name}\n".encode())
        self._file.flush()

    def settle(self, *, certain: bool) -> None:
        """End the request: any job of this name is nobody's.

        Args:
            certain: Whether Slurm has answered, so that nothing can arrive later.
        """
        threading.Thread(target=self._cancel, args=(certain,), name="jupyter_distrib-cancel", daemon=True).start()

    def _cancel(self, certain: bool) -> None:
        """Cancel until nothing can arrive any more; what this process does not live to see is the next one's."""
        until_s = None
        while until_s is None or time.monotonic() < until_s:
            if not cancel(self.name):
                until_s = None
            elif certain:
                break
            elif until_s is None:
                until_s = time.monotonic() + SETTLE_S
            time.sleep(AGAIN_S)
        self._path.unlink(missing_ok=True)
        self._file.close()


def cancel_left() -> None:
    """Cancel the jobs of requests whose process has ended, as far as Slurm answers."""
    for path in _folder().iterdir():
        with suppress(OSError), record_file.opened(path) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lines = file.read(LARGEST_BYTES).decode("utf-8", "replace").splitlines()
            if len(lines) == 2 and _NAME.fullmatch(name := lines[1]) and lines[0] == _cluster() and cancel(name):
                path.unlink()


def cancel(name: str) -> bool:
    """Cancel all jobs of this name; return whether Slurm has answered."""
    words = ["scancel", f"--user={os.getuid()}", f"--name={name}"]
    with suppress(subprocess.TimeoutExpired, OSError):
        return not subprocess.run(words, capture_output=True, timeout=ANSWER_S, check=False).returncode
    return False


def _folder() -> Path:
    folder = paths.runtime_directory() / "slurm-requests"
    paths.clear(folder, stat.S_IFDIR)
    return paths.private(folder)


def _cluster() -> str:
    """Return what tells one cluster from another: its configuration."""
    return os.environ.get("SLURM_CONF", "")
