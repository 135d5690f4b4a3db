"""Serves the coordinator of a Ray cluster, whatever started that cluster: `main` of the process that a pool starts."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jupyter_distrib.coordinator import source_archive
from jupyter_distrib.coordinator.node_count import NodeCount
from jupyter_distrib.coordinator.node_report import NodeReport, NodeReporter, OnReport
from jupyter_distrib.coordinator.placement import Placements
from jupyter_distrib.coordinator.server import Coordinator
from jupyter_distrib.pools.ray.cluster import Address
from jupyter_distrib.pools.ray.placement_plan import Wanted
from jupyter_distrib.pools.ray.reservation import RayCluster
from jupyter_distrib.system import signals
from jupyter_distrib.system.call_soon import CallSoon
from jupyter_distrib.system.event_loop import Loop
from jupyter_distrib.system.subprocess_future import subprocess_future
from jupyter_distrib.wire import messages as m

DEFAULT_IDLE_S = 600.0
TELL_S = 2.0
"""Seconds in which kernels that asked before the cluster proved unreachable get their answers."""
READ_BY_INSTALLERS = frozenset({"pip", "uv", "conda", "image_uri", "container"})
"""Keys of a runtime environment that make Ray itself need its `env_vars`, which it writes into its logs."""
_TYPE = "accelerator_type:"
"""Prefix of Ray's names of GPU types."""


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
    """Set up the process's signals: it serves only a socket of this user and ends by itself."""
    signals.reset()
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def serve(arguments: Sequence[str], options: Mapping[str, str], make: Callable[[Serving], RayCluster]) -> None:
    """Serve kernels until the coordinator is no longer needed.

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
    if cpus and "cpus_per_rank" in options:  # other users' part of the node is not for these
        env = {"OMP_NUM_THREADS": max(1, int(cpus)), **env}
    executable = ""
    if not environment.keys() & READ_BY_INSTALLERS:
        environment.pop("env_vars", None)
        executable = environment.get("py_executable", "")
    return Wanted(
        nodes=NodeCount.of(options),
        python=options.get("python", ""),
        cpus_per_rank=cpus,
        runtime_env=environment or None,
        executable=executable,
        env={name: str(value) for name, value in env.items()},
        copy_files="copy_files" in options,
    )


def reporter(loop: Loop, calls: CallSoon, joined: Future[Address]) -> NodeReporter:
    """Return the reporter of the cluster's nodes; it reports none before the cluster is joined."""

    def query_nodes(on_report: OnReport) -> NodeReport:
        if not joined.done() or joined.exception() is not None:
            return NodeReport()
        import ray  # as set up by the join

        nodes = [node for node in ray.nodes() if node["Alive"]]
        on_report(NodeReport(nodes=statuses(nodes, {})))
        return NodeReport(nodes=statuses(nodes, _free()))

    return NodeReporter(loop, calls, query_nodes)


def statuses(nodes: Sequence[Mapping[str, Any]], free: Mapping[str, Mapping[str, float]]) -> tuple[m.NodeStatus, ...]:
    """Return the status of each node.

    Args:
        nodes: The result of `ray.nodes()`.
        free: Free resources by the id of the node; a node that is missing has unknown ones.
    """
    return tuple(
        _status(node["NodeManagerAddress"], node["Resources"], free.get(node["NodeID"]))
        for node in sorted(nodes, key=lambda node: str(node["NodeManagerAddress"]))
    )


def _status(name: str, has: Mapping[str, float], free: Mapping[str, float] | None) -> m.NodeStatus:
    return m.NodeStatus(
        name=name,
        cpus=has.get("CPU", 0.0),
        free_cpus=None if free is None else free.get("CPU", 0.0),
        memory_bytes=int(has.get("memory", 0)),
        gpus=int(has.get("GPU", 0)),
        free_gpus=None if free is None else int(free.get("GPU", 0)),
        gpu_type=", ".join(sorted(kind.removeprefix(_TYPE) for kind in has if kind.startswith(_TYPE))),
    )


def _free() -> dict[str, dict[str, float]]:
    """Return the free resources of each node. Ray reveals them only to its own processes, so a client has one of
    those processes ask."""
    import ray
    from ray._private.client_mode_hook import client_mode_wrap
    from ray._private.state import available_resources_per_node

    return dict(client_mode_wrap(available_resources_per_node)()) if ray.is_initialized() else {}
