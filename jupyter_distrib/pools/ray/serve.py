"""Serves the coordinator of a Ray cluster, wherever that comes from: `main` of the process that a pool starts."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from jupyter_distrib.coordinator import source_archive
from jupyter_distrib.coordinator.placement import Placements
from jupyter_distrib.coordinator.server import Coordinator
from jupyter_distrib.pools.ray.cluster import Address
from jupyter_distrib.pools.ray.nodes import reporter
from jupyter_distrib.pools.ray.placement_plan import Wanted
from jupyter_distrib.pools.ray.reservation import RayCluster
from jupyter_distrib.system import signals
from jupyter_distrib.system.call_soon import CallSoon
from jupyter_distrib.system.subprocess_future import subprocess_future

DEFAULT_IDLE_S = 600.0
TELL_S = 2.0
"""Seconds in which kernels that asked before the cluster turned out unreachable get their answers."""
READ_BY_INSTALLERS = frozenset({"pip", "uv", "conda", "image_uri", "container"})
"""Keys of a runtime environment with any of which Ray itself needs its `env_vars`, too; it writes them into its
logs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """The parts of a coordinator that its cluster needs."""

    coordinator: Coordinator
    calls: CallSoon
    wanted: Wanted
    archive: Future[bytes]
    """This package as a file, for the nodes."""
    joined: Future[Address]
    """Future that the cluster sets when it is joined."""


def prepare() -> None:
    """Set up the process, which serves a socket of the user's alone and ends by itself."""
    signals.reset()
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def serve(arguments: Sequence[str], options: Mapping[str, str], make: Callable[[Serving], RayCluster]) -> None:
    """Serve kernels until nobody needs it.

    Args:
        arguments: The socket's descriptor, the folder of sockets, and the coordinator's name in it.
        options: The pool's options, as texts.
        make: Makes the cluster, which it may join later.
    """
    socket_fd, directory, name = int(arguments[0]), arguments[1], arguments[2]
    archive = subprocess_future(source_archive.archive, socket_fd)
    idle_s = float(options.get("idle", DEFAULT_IDLE_S))
    coordinator = Coordinator(socket.socket(fileno=socket_fd), Path(directory), name, idle_s=idle_s)
    serving = Serving(
        coordinator=coordinator,
        calls=CallSoon(coordinator.loop),
        wanted=read_wanted(options),
        archive=archive,
        joined=Future(),
    )
    reserve, copy_files = make(serving).reserve, serving.wanted.copy_files
    coordinator.find_nodes = Placements(serving.calls, reserve, copy_files=copy_files).find
    coordinator.ask_nodes = reporter(coordinator.loop, serving.calls, serving.joined).ask
    signal.signal(signal.SIGTERM, lambda *_: coordinator.stop())
    coordinator.run()


def read_wanted(options: Mapping[str, str]) -> Wanted:
    """Return the pool's options for the spread of worker groups."""
    environment = json.loads(options.get("runtime_env", "{}"))
    env = environment.get("env_vars", {})
    cpus = float(options.get("cpus_per_rank", "1"))
    if cpus and "cpus_per_rank" in options:  # what others have of the node is not for these
        env = {"OMP_NUM_THREADS": max(1, int(cpus)), **env}
    executable = ""
    if not environment.keys() & READ_BY_INSTALLERS:
        environment.pop("env_vars", None)
        executable = environment.get("py_executable", "")
    return Wanted(
        nodes=int(options.get("nodes", "0")),
        python=options.get("python", ""),
        cpus_per_rank=cpus,
        runtime_env=environment or None,
        executable=executable,
        env={name: str(value) for name, value in env.items()},
        copy_files="copy_files" in options,
    )
