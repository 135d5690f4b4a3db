"""Tells what one more rank of a pool would get, in the same words for all pools. Kernel side; pure."""

from __future__ import annotations

from collections.abc import Sequence

from jupyter_distrib.wire import messages as m


def next_rank(server: m.ServerStatus) -> str:
    """Return the end of a sentence that begins with `next rank`; empty if unknown.

    Args:
        server: The status of the pool's process.
    """
    if server.next_rank:
        return server.next_rank
    if not (nodes := server.nodes):
        return ""
    usable = [node for node in nodes if not node.state]
    if gpus := sum(node.gpus for node in usable):
        free = _sum([node.free_gpus for node in usable if node.gpus])
        return "" if free is None else _availability("GPU", gpus, free, _holders(server, usable))
    free_cpus = _sum([node.free_cpus for node in usable])
    if usable and free_cpus is None:
        return "at once, on the CPU"
    cpus = sum(node.cpus for node in usable)
    return _availability("CPU", cpus, free_cpus or 0, _holders(server, usable)) if usable else "no node can be used now"


def _availability(what: str, total: float, free: float, holders: Sequence[str]) -> str:
    if free >= 1:
        return f"at once: {free:g} of {total:g} {what}{'s' * (total != 1)} {'are' if free != 1 else 'is'} free"
    held = f" ({'; '.join(holders)})" if holders else ""
    which = f"all {total:g} {what}s are" if total != 1 else f"the {what} is"
    return f"{which} held{held}: wait for one with --wait S, or give back yours with %distributed_pool stop"


def _holders(server: m.ServerStatus, nodes: Sequence[m.NodeStatus]) -> list[str]:
    """Return the holders of devices, each once."""
    holders = [gpu.holder for gpu in server.gpus] + [holder for node in nodes for holder in node.holders]
    return list(dict.fromkeys(filter(None, holders or [group.holder for group in server.groups if group.workers])))


def _sum(counts: Sequence[float | None]) -> float | None:
    """Return the sum; None if any is unknown."""
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None
