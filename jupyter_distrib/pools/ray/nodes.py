"""Lists the nodes of a Ray cluster, and how much of each is free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from jupyter_distrib.coordinator.node_report import NodeReport, NodeReporter, Tell
from jupyter_distrib.pools.ray.cluster import Address
from jupyter_distrib.system.call_soon import CallSoon
from jupyter_distrib.system.event_loop import Loop
from jupyter_distrib.wire import messages as m

_TYPE = "accelerator_type:"
"""Prefix of Ray's names of GPU types."""


def reporter(loop: Loop, calls: CallSoon, joined: Future[Address]) -> NodeReporter:
    """Return what reports the nodes of the cluster, once it has been joined."""

    def look(tell: Tell) -> NodeReport:
        if not joined.done() or joined.exception() is not None:
            return NodeReport()
        import ray  # as the join has set it up

        nodes = [node for node in ray.nodes() if node["Alive"]]
        tell(NodeReport(nodes=statuses(nodes, {})))
        return NodeReport(nodes=statuses(nodes, _free()))

    return NodeReporter(loop, calls, look)


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
    """Return what is free on each node. Ray gives it only to its own processes; a client has one of those ask."""
    import ray
    from ray._private.client_mode_hook import client_mode_wrap
    from ray._private.state import available_resources_per_node

    return dict(client_mode_wrap(available_resources_per_node)()) if ray.is_initialized() else {}
