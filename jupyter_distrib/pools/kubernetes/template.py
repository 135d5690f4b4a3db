"""Reads the object that a user's pods start from: a Pod, a Job or a JobSet. Pure, but for `read`."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jupyter_distrib.errors import PoolError
from jupyter_distrib.pools.kubernetes.kubectl import Kubectl, KubectlFailed

RANKS = "ranks"
"""Name of the container, and of the JobSet's part, that is for the ranks, where there are several."""
KINDS = ("Pod", "Job", "JobSet")
JOB = "batch/v1"
JOB_SET = "jobset.x-k8s.io/v1alpha2"
LARGEST_BYTES = 1 << 20
_KEPT = ("labels", "annotations")
"""Parts of an object's metadata that are kept: names, owners and states belong to the original object."""
_BY_A_CONTROLLER = ("controller-uid", "job-name", "job-completion-index", "jobset-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """The object that pods start from."""

    job: dict[str, Any] = field(default_factory=dict)
    """A Job's metadata and spec, with the pod's in its `template`."""
    job_set: dict[str, Any] | None = None
    """The JobSet around it, if it is one."""
    part: str = RANKS
    """Name of the JobSet's part that has the job."""
    namespace: str = ""

    @property
    def pod(self) -> dict[str, Any]:
        """The spec of the pod."""
        spec: dict[str, Any] = self.job["spec"]["template"]["spec"]
        return spec

    @property
    def container(self) -> dict[str, Any]:
        """The container for the ranks."""
        return _for_ranks(self.pod["containers"], "containers")


def none() -> Template:
    """Return the empty template of a pool that names no file."""
    return Template(job={"metadata": {}, "spec": {"template": {"spec": {"containers": [{"name": RANKS}]}}}})


def read(path: str, kubectl: Kubectl) -> Template:
    """Return the template in a file. Raises `PoolError`."""
    try:
        if os.path.getsize(path) > LARGEST_BYTES:
            raise PoolError(
                f"the template {path} is larger than {LARGEST_BYTES >> 20} MB: it has to be one Pod, Job or JobSet."
            )
        with open(path, "rb") as file:
            text = file.read()
    except OSError as error:
        raise PoolError(f"the template {path} cannot be read ({error.strerror}): correct template.") from None
    try:  # kubectl reads YAML locally, without a cluster
        found = kubectl.output("patch", "--local", "-f", "-", "-p", "{}", "--type=merge", "--output=json", given=text)
    except KubectlFailed as error:
        raise PoolError(f"the template {path} is not a Kubernetes object: {error.last}.") from None
    return taken(objects(found), path)


def objects(text: str) -> list[Any]:
    """Return the objects that kubectl has written, one after another."""
    found, decoder = [], json.JSONDecoder()
    while text := text.lstrip():
        value, end = decoder.raw_decode(text)
        found.append(value)
        text = text[end:]
    return found


def taken(found: list[Any], path: str) -> Template:
    """Return the template made from an object. Raises `PoolError`."""
    try:
        return _taken(found)
    except PoolError as error:
        raise PoolError(f"the template {path} {error}") from None
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):
        raise malformed(path) from None


def malformed(path: str) -> PoolError:
    """Return the error for a template that Kubernetes would not accept either."""
    return PoolError(
        f"the template {path} is not a valid Pod, Job or JobSet: try `kubectl create --dry-run=server -f {path}`."
    )


def _taken(found: list[Any]) -> Template:
    if len(found) != 1 or "items" in found[0]:
        raise PoolError("has several objects: leave one Pod, Job or JobSet in it.")
    [one] = copy.deepcopy(found)
    kind, namespace = one["kind"], one.get("metadata", {}).get("namespace", "")
    template = Template(namespace=namespace)
    match kind:
        case "Pod":
            pod = {"metadata": _metadata(one), "spec": one["spec"]}
            template = Template(job={"metadata": {}, "spec": {"template": pod}}, namespace=namespace)
        case "Job":
            template = Template(job={"metadata": _metadata(one), "spec": one["spec"]}, namespace=namespace)
        case "JobSet":
            part = _for_ranks(one["spec"]["replicatedJobs"], "replicatedJobs")
            template = Template(
                job=part["template"],
                job_set={"metadata": _metadata(one), "spec": one["spec"]},
                part=str(part["name"]),
                namespace=namespace,
            )
        case _:
            raise PoolError(f"is a {kind}: it has to be a Pod, a Job or a JobSet.")
    _check(template)
    return template


def _check(template: Template) -> None:
    """Raise `PoolError` for pods in which ranks cannot be kept."""
    inner = template.job["spec"]["template"]
    inner["metadata"] = _metadata(inner)
    for key in ("shareProcessNamespace", "hostPID"):
        if template.pod.get(key):
            raise PoolError(
                f"sets {key}, with which a pod cannot tell whether its ranks are in use, and would stay: remove it."
            )
    if not isinstance(template.container, dict):
        raise TypeError


def _metadata(of: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of an object's metadata that is kept, without the labels that belong to a controller's other
    objects."""
    found = of.get("metadata") or {}
    kept = {key: dict(found[key]) for key in _KEPT if found.get(key)}
    for labels in kept.values():
        for label in [*labels]:
            if label.rpartition("/")[2].startswith(_BY_A_CONTROLLER):
                del labels[label]
    return kept


def _for_ranks(items: list[dict[str, Any]], what: str) -> dict[str, Any]:
    """Return the item that is for the ranks: the only one, or the one with that name."""
    if len(items) == 1:
        return items[0]
    for item in items:
        if item["name"] == RANKS:
            return item
    raise PoolError(f"has {len(items)} {what}: name the one for the ranks {RANKS}.")
