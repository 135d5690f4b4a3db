"""`python -m jupyter_distrib.agent SOCKET_FD DIRECTORY NAME [--alone]`: started by `pools/server_home.py` or
`coordinator/relay.py`, which has bound the socket. With `--alone` it leaves its parent, and removes the directory in
the end."""

from __future__ import annotations

import os
import signal
import socket
import sys

from jupyter_distrib.system import signals
from jupyter_distrib.system.launch import AGENT, launch, own_mark


def main(socket_fd: int, directory: str, name: str, *, alone: bool = False) -> None:
    if alone and os.fork():
        os._exit(0)
    signals.reset()  # ranks would inherit what is ignored or blocked here
    for number in (signal.SIGINT, signal.SIGHUP):  # signals of a terminal or a kernel, never meant for this process
        signal.signal(number, signal.SIG_IGN)
    os.environ[AGENT] = own_mark()
    launched = launch()

    # While the forkserver imports torch:
    import shutil
    from pathlib import Path

    from jupyter_distrib.agent.server import Agent
    from jupyter_distrib.system import reap
    from jupyter_distrib.system.process import become_subreaper

    become_subreaper()
    reap.kill_orphans()
    agent = Agent(socket.socket(fileno=socket_fd), Path(directory), name, launched)
    signal.signal(signal.SIGTERM, lambda *_: agent.stop())
    agent.run()
    if alone:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], alone="--alone" in sys.argv[4:])
