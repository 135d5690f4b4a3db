"""`python -m jupyter_distrib.agent SOCKET_FD DIRECTORY NAME`: started by `pools/local.py`, which has bound the
socket."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

from jupyter_distrib.agent.server import Agent
from jupyter_distrib.worker.process import become_subreaper


def main(socket_fd: int, directory: str, name: str) -> None:
    os.umask(0o077)
    become_subreaper()
    for number in (signal.SIGINT, signal.SIGHUP):  # a terminal's or a kernel's, never meant for us
        signal.signal(number, signal.SIG_IGN)
    agent = Agent(socket.socket(fileno=socket_fd), Path(directory), name)
    signal.signal(signal.SIGTERM, lambda *_: agent.stop())
    agent.run()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
