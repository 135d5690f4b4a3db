"""Makes the object that is created: a Job with one pod for each index, or the JobSet around it. Pure.

Changes only the necessary parts of a template (docs/kubernetes.md lists them)."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jupyter_distrib.options import duration_s
from jupyter_distrib.pools.kubernetes import keeper
from jupyter_distrib.pools.kubernetes.template import JOB, JOB_SET, Template

REQUEST = "jupyter-distrib/request"
"""Label of the object and its pods: the object's name."""
QUEUE = "kueue.x-k8s.io/queue-name"
GPU = "nvidia.com/gpu"
TTL_S = 60
"""Seconds for which an object that has ended stays if nobody deletes it."""
GRACE_S = 5
_SHM = "/dev/shm"  # noqa: S108 - the pod's own


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The pods of one worker group."""

    pods: int
    ranks: int
    """Maximum number of ranks per pod."""
    gpus: bool


def shape(options: Mapping[str, str], size: int, *, gpus: bool) -> Shape:
    """Return the pods for this many ranks: as few as possible, or `nodes` pods."""
    per_pod = int(options.get("gpus_per_pod", "0")) if gpus else 0
    pods = min(size, int(options.get("nodes", "0"))) or -(-size // (per_pod or size))
    return Shape(pods=pods, ranks=per_pod if per_pod and "nodes" not in options else -(-size // pods), gpus=gpus)


def object_name(title: str, random: str) -> str:
    """Return a name for the object, with as much of the notebook's name in it as is allowed."""
    words = re.sub(r"[^a-z0-9]+", "-", title.lower().removesuffix(".ipynb"))[:24].strip("-")
    return f"jd-{words}-{random}" if words else f"jd-{random}"


def made(
    options: Mapping[str, str], template: Template, name: str, wanted: Shape, owner: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the object. `owner` is the notebook's own pod, with which the object is deleted."""
    template = copy.deepcopy(template)
    _patch_pod(options, template, wanted)
    inner = template.job["spec"]["template"]
    _label(inner.setdefault("metadata", {}), name)
    spec = template.job["spec"]
    for key in ("selector", "manualSelector"):
        spec.pop(key, None)
    spec |= {"completions": wanted.pods, "parallelism": wanted.pods, "completionMode": "Indexed", "backoffLimit": 0}
    spec.setdefault("podReplacementPolicy", "Failed")  # no index has two pods
    if "time" in options:
        spec["activeDeadlineSeconds"] = duration_s(options["time"])
    whole = {"apiVersion": JOB, "kind": "Job", "metadata": template.job.get("metadata") or {}, "spec": spec}
    if template.job_set is not None:
        whole = _job_set(template, template.job_set)
    whole["spec"].setdefault("ttlSecondsAfterFinished", TTL_S)
    metadata = whole["metadata"]
    _label(metadata, name)
    metadata["name"] = name
    if "queue" in options:
        metadata["labels"][QUEUE] = options["queue"]
    if QUEUE in metadata["labels"]:
        whole["spec"]["suspend"] = True
    if owner is not None:
        metadata["ownerReferences"] = [dict(owner)]
    return whole


def _job_set(template: Template, job_set: dict[str, Any]) -> dict[str, Any]:
    """Return the JobSet; its other parts stay as they are."""
    for part in job_set["spec"]["replicatedJobs"]:
        if part["name"] == template.part:
            part |= {"replicas": 1, "template": template.job}
    job_set["spec"]["failurePolicy"] = {"maxRestarts": 0}
    return {"apiVersion": JOB_SET, "kind": "JobSet", "metadata": job_set["metadata"], "spec": job_set["spec"]}


def deadline_s(whole: Mapping[str, Any], template: Template) -> float | None:
    """Return the seconds after which the cluster ends the pods; None if there is no limit."""
    spec = whole["spec"]
    if template.job_set is not None:
        spec = next(part["template"]["spec"] for part in spec["replicatedJobs"] if part["name"] == template.part)
    limit_s = spec.get("activeDeadlineSeconds")
    return float(limit_s) if limit_s else None


def _label(metadata: dict[str, Any], name: str) -> None:
    metadata["labels"] = {
        **(metadata.get("labels") or {}),
        "app.kubernetes.io/managed-by": "jupyter-distrib",
        REQUEST: name,
    }


def _patch_pod(options: Mapping[str, str], template: Template, wanted: Shape) -> None:
    pod, container = template.pod, template.container
    pod["restartPolicy"] = "Never"
    pod.setdefault("terminationGracePeriodSeconds", GRACE_S)
    if "service_account" in options:
        pod["serviceAccountName"] = options["service_account"]
        pod.pop("serviceAccount", None)  # the old name of the field
    if "image" in options:
        container["image"] = options["image"]
    container["command"] = keeper.keeper(options["python"])
    for key in ("args", "livenessProbe", "readinessProbe", "startupProbe"):
        container.pop(key, None)  # these concern the program that does not run there
    _resources(options, container, wanted)
    _shared_memory(options, pod, container)


def _resources(options: Mapping[str, str], container: dict[str, Any], wanted: Shape) -> None:
    resources = container.get("resources") or {}
    limits = {key: options[key] for key in ("cpu", "memory") if key in options}
    if wanted.gpus:
        limits[options.get("gpu_resource", GPU)] = str(wanted.ranks)
    if limits:
        for key in ("limits", "requests"):
            resources[key] = {**(resources.get(key) or {}), **limits}
        container["resources"] = resources


def _shared_memory(options: Mapping[str, str], pod: dict[str, Any], container: dict[str, Any]) -> None:
    """Mount a volume in memory: without one, /dev/shm has 64 MB, and torch's DataLoader fails with workers."""
    mounts = container["volumeMounts"] = [*(container.get("volumeMounts") or [])]
    if any(mount.get("mountPath", "").rstrip("/") == _SHM for mount in mounts):
        return
    volumes = pod["volumes"] = [*(pod.get("volumes") or [])]
    name = "jupyter-distrib-shm"
    limit = {"sizeLimit": options["shm"]} if "shm" in options else {}
    volumes.append({"name": name, "emptyDir": {"medium": "Memory", **limit}})
    mounts.append({"name": name, "mountPath": _SHM})
