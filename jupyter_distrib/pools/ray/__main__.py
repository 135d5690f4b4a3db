"""`python -m jupyter_distrib.pools.ray SOCKET_FD DIRECTORY NAME`: started by `pools/ray/pool.py`, which has bound the
socket. The pool's options are JSON on standard input: they may hold keys, and Ray shows command lines as entrypoints of
jobs."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from jupyter_distrib.coordinator import source_archive
from jupyter_distrib.coordinator.placement import Placements
from jupyter_distrib.coordinator.run import LOST_LOGS_S
from jupyter_distrib.coordinator.server import Coordinator
from jupyter_distrib.pools.ray import cluster
from jupyter_distrib.pools.ray.nodes import Nodes
from jupyter_distrib.pools.ray.placement_plan import Wanted
from jupyter_distrib.pools.ray.reservation import RayCluster
from jupyter_distrib.system.call_soon import CallSoon
from jupyter_distrib.system.subprocess_future import subprocess_future

DEFAULT_IDLE_S = 600.0
READ_BY_INSTALLERS = frozenset({"pip", "uv", "conda", "image_uri", "container"})
"""Keys of a runtime environment with any of which Ray itself needs its `env_vars`, too; it writes them into its
logs."""
TELL_S = 2.0
"""Seconds in which kernels that asked before the cluster turned out unreachable get their answers."""


def main(socket_fd: int, directory: str, name: str, options: dict[str, str]) -> None:
    os.umask(0o077)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    looking = subprocess_future(
        partial(cluster.look, options.get("address", "auto"), insecure="insecure" in options), socket_fd
    )
    archive = subprocess_future(source_archive.archive, socket_fd)
    idle_s = float(options.get("idle", DEFAULT_IDLE_S))
    coordinator = Coordinator(socket.socket(fileno=socket_fd), Path(directory), name, idle_s=idle_s)
    calls, wanted = CallSoon(coordinator.loop), _wanted(options)
    joined = _join(looking, coordinator, calls)
    reserve = RayCluster(calls, wanted, joined, archive).reserve
    coordinator.find_nodes = Placements(calls, reserve, copy_files=wanted.copy_files).find
    coordinator.ask_nodes = Nodes(coordinator.loop, calls, joined).ask
    signal.signal(signal.SIGTERM, lambda *_: coordinator.stop())
    coordinator.run()
    os._exit(0)  # Ray's own threads take seconds to leave, and have nothing of ours


def _join(looking: Future[cluster.Looked], coordinator: Coordinator, calls: CallSoon) -> Future[cluster.Address]:
    """Join the cluster in a thread, since Ray may take its time or hang. On failure, kernels that ask get the reason
    and the coordinator ends, so that the next cell tries anew. It also ends when Ray Client has lost its connection for
    good, since without it Ray ends the process."""
    joined: Future[cluster.Address] = Future()

    def join() -> None:
        try:
            address = cluster.join(looking)
        except Exception as error:  # noqa: BLE001 - Ray's, or our own sentence
            calls.put(lambda: coordinator.give_up(TELL_S))  # first, so that who is refused asks another one
            joined.set_exception(error)
        else:
            coordinator.title = f"Ray at {address.shown}"
            joined.set_result(address)
            if address.client:
                cluster.wait_until_cut()
                said = f"the connection to the Ray cluster at {address.shown} is lost, and all that was there with it."
                calls.put(lambda: coordinator.lose(said, LOST_LOGS_S + TELL_S))

    threading.Thread(target=join, name="jupyter_distrib-join", daemon=True).start()
    return joined


def _wanted(options: dict[str, str]) -> Wanted:
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


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], json.load(sys.stdin))
