"""Serves the coordinator of a pool of hosts: `main` of the process that the pool starts."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Protocol

from jupyter_distrib.coordinator import source_archive
from jupyter_distrib.coordinator.engine import Reservation
from jupyter_distrib.coordinator.node_report import Tell
from jupyter_distrib.coordinator.placement import Placements
from jupyter_distrib.coordinator.server import Coordinator
from jupyter_distrib.pools.command.command import HostCommand
from jupyter_distrib.pools.command.connect import BROUGHT
from jupyter_distrib.pools.command.hosts import read_hosts
from jupyter_distrib.pools.command.reservation import HostOptions, Hosts
from jupyter_distrib.system import signals
from jupyter_distrib.system.call_soon import CallSoon
from jupyter_distrib.system.event_loop import Loop
from jupyter_distrib.system.subprocess_future import subprocess_future
from jupyter_distrib.wire import messages as m

DEFAULT_IDLE_S = 600.0


class Engine(Protocol):
    """Reserves hosts for worker groups, and reports them."""

    def reserve(self, command: m.OpenWorkerGroup, hello: m.Hello, say: Callable[[str], None], /) -> Reservation:
        """See `coordinator.engine.Reserve`."""

    def ask(self, tell: Tell, /) -> None:
        """See `Coordinator.ask_nodes`."""


def serve(
    make: Callable[[Loop, CallSoon, Future[bytes]], Engine],
    title: str,
    arguments: Sequence[str],
    options: Mapping[str, str],
) -> None:
    """Serve kernels until nobody needs it.

    Args:
        make: Makes the engine, from the loop and this package as a file.
        title: The name of the hosts for people.
        arguments: The socket's descriptor, the folder of sockets, and the coordinator's name in it.
        options: The pool's options, as texts.
    """
    socket_fd, directory, name = int(arguments[0]), arguments[1], arguments[2]
    signals.reset()
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    archive = subprocess_future(partial(source_archive.archive, BROUGHT, any_python=False), socket_fd)
    idle_s = float(options.get("idle", DEFAULT_IDLE_S))
    coordinator = Coordinator(socket.socket(fileno=socket_fd), Path(directory), name, idle_s=idle_s)
    calls = CallSoon(coordinator.loop)
    engine = make(coordinator.loop, calls, archive)
    coordinator.title = title
    coordinator.find_nodes = Placements(calls, engine.reserve, copy_files="copy_files" in options).find
    coordinator.ask_nodes = engine.ask
    signal.signal(signal.SIGTERM, lambda *_: coordinator.stop())
    coordinator.run()
    os._exit(0)  # threads that end connections have nothing of ours


def serve_hosts(command: HostCommand, arguments: Sequence[str], options: Mapping[str, str]) -> None:
    """Serve the hosts that the pool's options name; `command` is the way to them."""
    own = HostOptions(
        hosts=read_hosts("hosts", options["hosts"]),
        nodes=int(options.get("nodes", "0")),
        interface=options.get("interface", ""),
    )
    title = f"{command.engine} to {', '.join(host.name for host in own.hosts)}"
    serve(partial(Hosts, command, own), title, arguments, options)
