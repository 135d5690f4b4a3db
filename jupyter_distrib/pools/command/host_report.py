"""Reports the hosts of a pool: what they have, and who has their GPUs. A host to which nobody is connected is reported
with what it said last. Blocks, in a thread of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any

from jupyter_distrib.coordinator.node_report import NodeReport
from jupyter_distrib.pools.command.channel import PipeChannel
from jupyter_distrib.pools.command.host_gpus import HostGpus
from jupyter_distrib.pools.command.hosts import Host
from jupyter_distrib.wire import messages as m

ANSWER_S = 1.5
"""Seconds in which the hosts have to answer."""
NOT_REACHED = "not reached yet"


def report(
    hosts: Sequence[Host], facts: Mapping[str, Mapping[str, Any]], channels: Mapping[str, PipeChannel]
) -> NodeReport:
    """Return the report.

    Args:
        hosts: The hosts of the pool.
        facts: What hosts have said of themselves, by name.
        channels: The hosts that are connected, by name.
    """
    asked = {name: channel.ask("gpus", "") for name, channel in channels.items()}
    wait(asked.values(), ANSWER_S)
    nodes = [_status(host, facts.get(host.name), _answer(asked.get(host.name))) for host in hosts]
    unknown = all(node.state == NOT_REACHED for node in nodes)
    return NodeReport(nodes=tuple(nodes), next_rank="the next cell connects to the hosts" if unknown else "")


def _answer(asked: Future[Any] | None) -> HostGpus | None:
    if asked is not None and asked.done():
        with suppress(Exception):  # it is lost, which its cell is told
            return HostGpus(**asked.result())
    return None


def _status(host: Host, facts: Mapping[str, Any] | None, gpus: HostGpus | None) -> m.NodeStatus:
    if facts is None:
        return m.NodeStatus(name=host.name, cpus=0.0, memory_bytes=0, state=NOT_REACHED)
    names = gpus.names if gpus else facts.get("gpus", ())
    held = Counter(filter(None, gpus.holders)) if gpus else {}
    return m.NodeStatus(
        name=host.name,
        cpus=float(facts["cpus"]),
        memory_bytes=int(facts["memory_bytes"]),
        gpus=len(names),
        free_gpus=gpus.free if gpus else None,
        gpu_type=", ".join(dict.fromkeys(names)),
        holders=tuple(f"{holder}, {count} GPU{'s' * (count > 1)}" for holder, count in held.items()),
    )
