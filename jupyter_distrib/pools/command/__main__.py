"""`python -m jupyter_distrib.pools.command SOCKET_FD DIRECTORY NAME`: the coordinator of any pool of hosts, which
`HostsPool.connect` starts. Standard input is JSON: the pool's class, the folder that has it, and its options, which
are not on the command line, since that is visible to all."""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path

from jupyter_distrib.coordinator import source_archive
from jupyter_distrib.coordinator.placement import Placements
from jupyter_distrib.coordinator.server import Coordinator
from jupyter_distrib.pools.command.connect import BROUGHT
from jupyter_distrib.pools.command.hosts_pool import HostsPool
from jupyter_distrib.system import signals
from jupyter_distrib.system.call_soon import CallSoon
from jupyter_distrib.system.subprocess_future import subprocess_future

DEFAULT_IDLE_S = 600.0


def main() -> None:
    given = json.load(sys.stdin)
    if given["folder"] not in sys.path:
        # The kernel found the class in this folder, which it may have added to the path itself.
        sys.path.append(given["folder"])
    module, _, name = given["pool"].partition(":")
    cls: type[HostsPool] = attrgetter(name)(importlib.import_module(module))
    _serve(cls(**given["options"]), sys.argv[1:])


def _serve(pool: HostsPool, arguments: Sequence[str]) -> None:
    """Serve kernels until the coordinator is no longer needed.

    Args:
        pool: The pool.
        arguments: The socket's descriptor, the folder of sockets, and the coordinator's name in it.
    """
    socket_fd, directory, name = int(arguments[0]), arguments[1], arguments[2]
    signals.reset()
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    archive = subprocess_future(partial(source_archive.archive, BROUGHT, any_python=False), socket_fd)
    idle_s = float(pool.given.get("idle", DEFAULT_IDLE_S))
    coordinator = Coordinator(socket.socket(fileno=socket_fd), Path(directory), name, idle_s=idle_s)
    calls = CallSoon(coordinator.loop)
    engine = pool.reach(coordinator.loop, calls, archive)
    coordinator.title = pool.title
    coordinator.find_nodes = Placements(calls, engine.reserve, copy_files="copy_files" in pool.given).find
    coordinator.ask_nodes = engine.ask
    coordinator.on_use = getattr(engine, "set_busy", None)
    signal.signal(signal.SIGTERM, lambda *_: coordinator.stop())
    coordinator.run()
    os._exit(0)  # threads that end connections hold nothing of this package


if __name__ == "__main__":
    main()
