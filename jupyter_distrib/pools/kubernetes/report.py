"""Reports the cluster: its nodes, if they may be listed, and whether new pods may be created. Blocks, in a thread of
its own."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from jupyter_distrib.coordinator.node_report import NodeReport, Tell
from jupyter_distrib.errors import PoolError
from jupyter_distrib.pools.kubernetes import words
from jupyter_distrib.pools.kubernetes.kubectl import Kubectl, KubectlFailed
from jupyter_distrib.wire import messages as m

FRESH_S = 60.0
"""Seconds for which a report is reused, since many clients ask the server."""
ANSWER_S = 5.0
NEEDED = (
    ("create", "jobs.batch"),
    ("delete", "jobs.batch"),
    ("list", "pods"),
    ("watch", "pods"),
    ("create", "pods/exec"),
    ("get", "pods/exec"),
)
"""Rights that the role of the user must have; docs/kubernetes.md has all of them."""
_UNITS = {"": 1, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def look(kubectl: Kubectl, tell: Tell) -> NodeReport:
    """Return the report. Raises `PoolError` if the cluster does not answer."""
    found: tuple[m.NodeStatus, ...] | None = None
    with suppress(KubectlFailed, KeyError, TypeError, ValueError):  # most users may not see the nodes
        found = nodes(kubectl.asked("nodes", limit_s=ANSWER_S)["items"])
        tell(NodeReport(nodes=found))
    try:
        missing = missing_rights(kubectl)
    except PoolError as error:
        return NodeReport(nodes=found, next_rank=str(error))
    where = f" in namespace {kubectl.namespace}" if kubectl.namespace else ""
    if missing:
        return NodeReport(nodes=found, next_rank=f"is refused: your role does not allow {', '.join(missing)}{where}")
    return NodeReport(nodes=found, next_rank=f"with a new Job{where}, when its pods have nodes")


def missing_rights(kubectl: Kubectl) -> list[str]:
    """Return the rights that the role of the user lacks. Raises `PoolError` if the cluster does not answer."""
    return [f"{verb} {resource}" for verb, resource in NEEDED if not _can(kubectl, verb, resource)]


def _can(kubectl: Kubectl, verb: str, resource: str) -> bool:
    name, _, part = resource.partition("/")
    more = (f"--subresource={part}",) if part else ()
    try:
        return kubectl.output("auth", "can-i", verb, name, *more, limit_s=ANSWER_S).strip() == "yes"
    except KubectlFailed as error:
        if words.meaning(error.said):
            raise
        return False  # the answer `no` has exit status 1


def nodes(items: Iterable[Any]) -> tuple[m.NodeStatus, ...]:
    """Return the status of each node; most users may not see who has its GPUs."""
    return tuple(_node(item) for item in items)


def _node(item: Any) -> m.NodeStatus:
    has = item.get("status", {}).get("allocatable") or {}
    ready = [each for each in item.get("status", {}).get("conditions") or () if each.get("type") == "Ready"]
    gpus = sum(int(amount(text)) for name, text in has.items() if name.endswith("/gpu"))
    state = "" if any(each.get("status") == "True" for each in ready) else "not ready"
    if item.get("spec", {}).get("unschedulable"):
        state = "takes no new pods"
    return m.NodeStatus(
        name=words.name(item),
        cpus=amount(has.get("cpu", "0")),
        memory_bytes=int(amount(has.get("memory", "0"))),
        gpus=gpus,
        free_gpus=None,
        gpu_type=str((item["metadata"].get("labels") or {}).get("nvidia.com/gpu.product", "")),
        state=state,
    )


def amount(quantity: str) -> float:
    """Return the number that a quantity such as `64Gi` stands for; 0 if it is not a quantity."""
    match = re.fullmatch(r"([0-9.]+)([a-zA-Z]*)", str(quantity))
    return float(match[1]) * _UNITS.get(match[2], 0) if match else 0.0
