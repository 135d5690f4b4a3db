"""Execs a template. Imports next to nothing: the agent does it before it imports itself, since torch takes a second."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from typing import IO, NamedTuple


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
