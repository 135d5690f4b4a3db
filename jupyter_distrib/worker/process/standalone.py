"""The program of a rank that is not forked, needed for environment variables that are read when a program loads. The
agent sends its order first."""

from __future__ import annotations

import os
import socket
import sys

from jupyter_distrib.interfaces import framework
from jupyter_distrib.system import signals
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.link import Link
from jupyter_distrib.worker.environment import bytecode, threads


def main(link_fd: int, stdout_fd: int, stderr_fd: int, loading_fd: int) -> None:
    signals.reset()  # the agent ignores some
    bytecode.distrust_old()
    os.dup2(stderr_fd, 2)  # the error of an import must reach the agent
    with threads.loading():
        framework.load()

    from jupyter_distrib.worker.process.main import run_worker

    with socket.socket(fileno=os.dup(link_fd)) as sock:
        link = Link(sock)
        command = link.receive_one()
    assert isinstance(command, m.Fork)
    run_worker(command.orders[0], link_fd, stdout_fd, stderr_fd, loading_fd, early=False)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:5]))
