"""Lists the nodes of a Ray cluster, and how much of each is free. Used in the coordinator's loop; Ray is asked in a
thread of its own, since it may take its time or hang."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from jupyter_distrib.pools.ray.cluster import Address
from jupyter_distrib.system.call_soon import CallSoon
from jupyter_distrib.system.event_loop import Loop
from jupyter_distrib.wire.messages import NodeStatus

ANSWER_S = 2.0
"""Seconds after which the last state is reported if Ray does not answer."""
_TYPE = "accelerator_type:"
"""Prefix of Ray's names of GPU types."""
Tell = Callable[[tuple[NodeStatus, ...] | None], None]


class Nodes:
    """The cluster's nodes, as `statuses` returns them.

    Args:
        joined: The cluster, once it has been joined.
    """

    def __init__(self, loop: Loop, calls: CallSoon, joined: Future[Address]) -> None:
        self._loop, self._calls, self._joined = loop, calls, joined
        self._latest: tuple[NodeStatus, ...] | None = None
        self._waiting: list[Tell] = []
        self._asking = False

    def ask(self, tell: Tell) -> None:
        """Have `tell` called soon: with None before the cluster has been joined."""
        if not self._joined.done() or self._joined.exception() is not None:
            return tell(None)
        self._waiting.append(tell)
        self._loop.later(ANSWER_S, self._tell)
        if not self._asking:
            self._asking = True
            threading.Thread(target=self._ask, name="jupyter_distrib-nodes", daemon=True).start()

    def _ask(self) -> None:
        """Ask Ray; in a thread of its own."""
        import ray

        try:
            nodes = [node for node in ray.nodes() if node["Alive"]]
            self._calls.put(lambda: self._know(nodes, {}))
            free = _free()
            self._calls.put(lambda: self._know(nodes, free))
        except Exception:  # noqa: BLE001 - Ray raises all kinds: what is known is told
            traceback.print_exc()  # into the coordinator's log
        self._calls.put(self._asked)

    def _know(self, nodes: Sequence[Mapping[str, Any]], free: Mapping[str, Mapping[str, float]]) -> None:
        self._latest = statuses(nodes, free)

    def _asked(self) -> None:
        self._asking = False
        self._tell()

    def _tell(self) -> None:
        waiting, self._waiting = self._waiting, []
        for tell in waiting:
            tell(self._latest)


def statuses(nodes: Sequence[Mapping[str, Any]], free: Mapping[str, Mapping[str, float]]) -> tuple[NodeStatus, ...]:
    """Return the status of each node.

    Args:
        nodes: The result of `ray.nodes()`.
        free: Free resources by the id of the node; a node that is missing has unknown ones.
    """
    return tuple(
        _status(node["NodeManagerAddress"], node["Resources"], free.get(node["NodeID"]))
        for node in sorted(nodes, key=lambda node: str(node["NodeManagerAddress"]))
    )


def _status(name: str, has: Mapping[str, float], free: Mapping[str, float] | None) -> NodeStatus:
    return NodeStatus(
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
