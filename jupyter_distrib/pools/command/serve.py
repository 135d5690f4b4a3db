"""Serves the coordinator of a pool of hosts: `main` of the process that the pool starts."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from jupyter_distrib.coordinator import source_archive
from jupyter_distrib.coordinator.placement import Placements
from jupyter_distrib.coordinator.server import Coordinator
from jupyter_distrib.pools.command.command import HostCommand
from jupyter_distrib.pools.command.hosts import read_hosts
from jupyter_distrib.pools.command.reservation import HostOptions, Hosts
from jupyter_distrib.system.call_soon import CallSoon
from jupyter_distrib.system.subprocess_future import subprocess_future

DEFAULT_IDLE_S = 600.0
BROUGHT = ("cloudpickle", "nvidia-ml-py", "threadpoolctl")
"""Packages that hosts get with this one, so that they need nothing but torch."""


def serve(command: HostCommand, socket_fd: int, directory: str, name: str, options: Mapping[str, str]) -> None:
    """Serve kernels until nobody needs it, with the pool's options as texts."""
    os.umask(0o077)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    archive = subprocess_future(partial(source_archive.archive, BROUGHT), socket_fd)
    idle_s = float(options.get("idle", DEFAULT_IDLE_S))
    coordinator = Coordinator(socket.socket(fileno=socket_fd), Path(directory), name, idle_s=idle_s)
    calls = CallSoon(coordinator.loop)
    own = HostOptions(
        hosts=read_hosts("hosts", options["hosts"]),
        nodes=int(options.get("nodes", "0")),
        interface=options.get("interface", ""),
    )
    hosts = Hosts(command, own, coordinator.loop, calls, archive)
    coordinator.title = f"{command.engine} to {', '.join(host.name for host in own.hosts)}"
    coordinator.find_nodes = Placements(calls, hosts.reserve, copy_files="copy_files" in options).find
    coordinator.ask_nodes = hosts.ask
    signal.signal(signal.SIGTERM, lambda *_: coordinator.stop())
    coordinator.run()
    os._exit(0)  # threads that end connections have nothing of ours
