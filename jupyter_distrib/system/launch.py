"""Execs an agent, and an agent's forkserver. Imports next to nothing, not even `typing`: an agent does it before it
imports itself, since torch takes a second."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import IO

AGENT = "JUPYTER_DISTRIB_AGENT"
"""Variable by which everything that an agent has started, directly or not, can be found when the agent is gone."""
HASHED_ALIKE = {"PYTHONHASHSEED": "0"}
"""Variables of each program of ranks, unless the user has set another value: by default Python hashes texts differently
in each program, so that `list(set(labels))` would have another order on the ranks of another machine."""
Launched = tuple["subprocess.Popen[bytes]", tuple[socket.socket, socket.socket], "IO[bytes]"]
"""Forkserver that is importing torch; links to it and to the preloaded one that replaces it; its log."""


def exec_agent(
    path: str,
    log: IO[bytes],
    arguments: tuple[str, ...],
    env: dict[str, str],
    python: str = sys.executable,
    *,
    stdin_text: str = "",
) -> subprocess.Popen[bytes]:
    """Start a module that serves on a socket at `path`, which accepts connections at once.

    The process inherits the bound socket, and is in a session of its own, so that signals for its parent do not reach
    it. Its files are for this user alone. The first of `arguments` is the module; the others follow the socket's
    descriptor on its command line. It reads `stdin_text` from its standard input, since command lines are visible to
    all.
    """
    module, *rest = arguments
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen(64)
        fd = listener.fileno()
        process = subprocess.Popen(
            [python, "-P", "-m", module, str(fd), *rest],  # -P: no modules of the folder /
            pass_fds=[fd],
            stdin=subprocess.PIPE if stdin_text else subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
            umask=0o077,
            env=env,
        )
    if process.stdin is not None:
        with suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(stdin_text.encode())
    return process


_FORKSERVER = "jupyter_distrib.worker.process.forkserver"


def launch(log: IO[bytes] | None = None) -> Launched:
    """Exec a forkserver, which ends with this process. Its messages go into `log`, or a new file."""
    log = log or new_log()
    (early, its), (preloaded, their) = socket.socketpair(), socket.socketpair()
    fds = its.fileno(), their.fileno()
    with its, their:
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", _FORKSERVER, str(os.getpid()), *map(str, fds)],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**HASHED_ALIKE, **os.environ},
            )
        except OSError:
            early.close()
            preloaded.close()
            raise
    return process, (early, preloaded), log


def new_log() -> IO[bytes]:
    """Create a file without a name."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("forkserver.log"), "w+b")
    import tempfile

    return tempfile.TemporaryFile()


def own_mark() -> str:
    """Return a mark for this process that no later process with the same pid has; the value of `AGENT` in everything
    that an agent starts."""
    return f"{os.getpid()}.{began(os.getpid())}"


def began(pid: int) -> str:
    """Return the start time of a process, in the system's own ticks; empty if it is gone, or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            state, *fields = file.read().rpartition(")")[2].split()
    except (OSError, ValueError):
        return ""
    return "" if state in "ZX" else fields[18]
