"""Reports the cluster: its nodes, if they may be listed, and whether new pods may be created. Blocks, in a thread of
its own."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from jupyter_distrib.coordinator.node_report import NodeReport, OnReport
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
_NOT_ENDED = "status.phase!=Succeeded,status.phase!=Failed"
_UNITS = {"": 1, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def query_nodes(kubectl: Kubectl, on_report: OnReport) -> NodeReport:
    """Return the report. Raises `PoolError` if the cluster does not answer."""
    found: tuple[m.NodeStatus, ...] | None = None
    with suppress(KubectlFailed, KeyError, TypeError, ValueError):  # most users may not see the nodes
        found = nodes(kubectl.asked("nodes", limit_s=ANSWER_S)["items"])
        on_report(NodeReport(nodes=found))
        if any(node.gpus for node in found):
            with suppress(PoolError):  # fewer still may see the pods of all namespaces, without which nothing is known
                pods = kubectl.asked("pods", "--all-namespaces", f"--field-selector={_NOT_ENDED}", limit_s=ANSWER_S)
                found = with_free_gpus(found, pods["items"])
                on_report(NodeReport(nodes=found))
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
    """Return the status of each node; who has its GPUs is in the list of pods."""
    return tuple(_node(item) for item in items)


def with_free_gpus(nodes: Iterable[m.NodeStatus], pods: Iterable[Any]) -> tuple[m.NodeStatus, ...]:
    """Return the nodes with the number of GPUs that none of these pods, all that have not ended, has requested."""
    taken: Counter[str] = Counter()
    for pod in pods:
        if words.has_node(pod) and not words.has_ended(pod):
            taken[str(pod["spec"]["nodeName"])] += _gpus_of(pod["spec"])
    return tuple(replace(node, free_gpus=max(0, node.gpus - taken[node.name])) for node in nodes)


def _gpus_of(spec: Any) -> int:
    """Return the number of GPUs that a pod occupies. Init containers run before its containers, or beside them if they
    stay."""

    def wanted(container: Any) -> int:
        resources = container.get("resources") or {}
        texts = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
        return sum(int(amount(text)) for name, text in texts.items() if name.endswith("/gpu"))

    first = spec.get("initContainers") or ()
    staying = sum(wanted(each) for each in first if each.get("restartPolicy") == "Always")
    before = max((wanted(each) for each in first if each.get("restartPolicy") != "Always"), default=0)
    return max(staying + before, staying + sum(wanted(each) for each in spec["containers"]))


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
