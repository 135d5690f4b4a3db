"""Execs an agent, and for an agent its template. Imports next to nothing: an agent does it before it imports itself,
since torch takes a second."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from typing import IO, NamedTuple


def exec_agent(
    path: str,
    log: IO[bytes],
    arguments: tuple[str, ...],
    env: dict[str, str],
    python: str = sys.executable,
    *,
    told: str = "",
) -> subprocess.Popen[bytes]:
    """Start a module that serves on a socket at `path`, which can be connected to at once.

    It inherits the bound socket, and is in a session of its own, so that signals for its parent do not reach it. The
    first of `arguments` is the module; the others it is given, after the socket's descriptor. What it is `told` it
    reads from its standard input; command lines are for all to see.
    """
    module, *rest = arguments
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen(64)
        fd = listener.fileno()
        process = subprocess.Popen(
            [python, "-m", module, str(fd), *rest],
            pass_fds=[fd],
            stdin=subprocess.PIPE if told else subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
            env=env,
        )
    if process.stdin is not None:
        with suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(told.encode())
    return process


class Launched(NamedTuple):
    """A template that is importing torch."""

    process: subprocess.Popen[bytes]
    links: tuple[socket.socket, socket.socket]
    """To the early template, and to the fuller one that replaces it."""
    log: IO[bytes]


def launch(log: IO[bytes] | None = None) -> Launched:
    """It ends with this process; what it has to say goes into `log`, or a new file."""
    log = log or tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the template
    (early, its), (fuller, their) = socket.socketpair(), socket.socketpair()
    fds = its.fileno(), their.fileno()
    process = subprocess.Popen(
        [sys.executable, "-m", "jupyter_distrib.worker.template", str(os.getpid()), *map(str, fds)],
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    its.close()
    their.close()
    return Launched(process, (early, fuller), log)
