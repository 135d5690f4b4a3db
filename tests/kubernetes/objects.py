"""The objects of the stand-in cluster, their log for watches, and the controllers of Jobs and JobSets."""

from __future__ import annotations

import asyncio
import copy
import json
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

Object = dict[str, Any]
Key = tuple[str, str, str]
"""Plural name, namespace and name of an object."""

KINDS: Mapping[str, Mapping[str, str]] = {
    "v1": {"pods": "Pod", "events": "Event", "nodes": "Node", "namespaces": "Namespace"},
    "batch/v1": {"jobs": "Job"},
    "jobset.x-k8s.io/v1alpha2": {"jobsets": "JobSet"},
    "kueue.x-k8s.io/v1beta1": {"workloads": "Workload"},
    "authorization.k8s.io/v1": {"selfsubjectaccessreviews": "SelfSubjectAccessReview"},
}
NOT_IN_NAMESPACES = ("nodes", "namespaces", "selfsubjectaccessreviews")
ENDED = ("Succeeded", "Failed")
INDEX = "batch.kubernetes.io/job-completion-index"
GPU = "nvidia.com/gpu"


class Refused(Exception):
    """An answer that is no success."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.body = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message}
        self.body |= {"reason": reason, "details": {}, "code": code}


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


class Objects:
    """All objects. Every change gets a number and goes into the log, from which watches are served."""

    def __init__(self) -> None:
        self.all: dict[Key, Object] = {}
        self.log: list[tuple[int, str, str, str, Object]] = []
        self.version = 100
        self.changed = asyncio.Condition()
        self.stop_pod: Callable[[Object, float], bool] = lambda pod, grace_s: False
        """Stops the processes of a pod that is deleted; returns whether there are any."""

    def of(self, plural: str, namespace: str = "") -> list[Object]:
        return [one for (kind, where, _), one in self.all.items() if kind == plural and namespace in ("", where)]

    def put(self, plural: str, namespace: str, one: Object) -> Object:
        metadata = one["metadata"]
        key = (plural, namespace, metadata["name"])
        new = key not in self.all
        metadata.setdefault("uid", str(uuid.uuid4()))
        metadata.setdefault("creationTimestamp", now())
        if namespace:
            metadata["namespace"] = namespace
        self.all[key] = one
        self._tell("ADDED" if new else "MODIFIED", plural, namespace, one)
        return one

    def _tell(self, event: str, plural: str, namespace: str, one: Object) -> None:
        self.version += 1
        one["metadata"]["resourceVersion"] = str(self.version)
        self.log.append((self.version, event, plural, namespace, copy.deepcopy(one)))
        self._waking = asyncio.get_running_loop().create_task(self._wake())

    async def _wake(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    def delete(self, plural: str, namespace: str, name: str, grace_s: float | None = None) -> None:
        one = self.all.get((plural, namespace, name))
        if one is None:
            return
        if plural == "pods" and one["status"]["phase"] not in ENDED:
            wanted = one["spec"].get("terminationGracePeriodSeconds", 30) if grace_s is None else grace_s
            if self.stop_pod(one, wanted):
                one["metadata"].setdefault("deletionTimestamp", now())
                self.put(plural, namespace, one)
                return
        self.remove(plural, namespace, name)

    def remove(self, plural: str, namespace: str, name: str) -> None:
        """Remove an object, and delete what it owns."""
        one = self.all.pop((plural, namespace, name), None)
        if one is None:
            return
        self._tell("DELETED", plural, namespace, one)
        for key, other in [*self.all.items()]:
            if one["metadata"]["uid"] in owners(other):
                self.delete(*key)

    def event(self, about: Object, reason: str, message: str) -> None:
        namespace = about["metadata"]["namespace"]
        involved = {"kind": about["kind"], "name": about["metadata"]["name"], "namespace": namespace}
        metadata = {"name": f"{involved['name']}.{self.version:x}"}
        told = {"metadata": metadata, "reason": reason, "message": message, "lastTimestamp": now()}
        self.put("events", namespace, {"kind": "Event", "apiVersion": "v1", "involvedObject": involved, **told})


def owners(one: Object) -> set[str]:
    return {each["uid"] for each in one["metadata"].get("ownerReferences", ())}


def owned_by(one: Object) -> list[Object]:
    metadata = one["metadata"]
    reference = {"apiVersion": one["apiVersion"], "kind": one["kind"], "name": metadata["name"], "uid": metadata["uid"]}
    return [{**reference, "controller": True}]


def gpus_of(pod: Object) -> int:
    limits = [each.get("resources", {}).get("limits") or {} for each in pod["spec"]["containers"]]
    return sum(int(each.get(GPU, 0)) for each in limits)


class Controllers:
    """What makes pods of Jobs, and Jobs of JobSets, and ends them; called again and again."""

    def __init__(self, objects: Objects, admit: Callable[[str, str, Object], Object]) -> None:
        self._objects, self._admit = objects, admit
        self._began: dict[str, float] = {}
        self._ended: dict[str, float] = {}

    def turn(self) -> None:
        for one in self._objects.of("jobsets"):
            self._job_set(one)
        for one in self._objects.of("jobs"):
            self._job(one)

    def _owned(self, plural: str, one: Object) -> list[Object]:
        return [each for each in self._objects.of(plural) if one["metadata"]["uid"] in owners(each)]

    def _job_set(self, one: Object) -> None:
        if self._owned("jobs", one) or one["spec"].get("suspend"):
            return
        for part in one["spec"]["replicatedJobs"]:
            for number in range(part.get("replicas", 1)):
                made = copy.deepcopy(part["template"])
                made["metadata"] = {**made.get("metadata", {}), "ownerReferences": owned_by(one)}
                made["metadata"]["name"] = f"{one['metadata']['name']}-{part['name']}-{number}"
                self._admit("jobs", one["metadata"]["namespace"], {"kind": "Job", "apiVersion": "batch/v1", **made})

    def _job(self, job: Object) -> None:
        uid, spec, pods = job["metadata"]["uid"], job["spec"], self._owned("pods", job)
        namespace, name = job["metadata"]["namespace"], job["metadata"]["name"]
        if uid in self._ended:
            if time.monotonic() > self._ended[uid] + spec.get("ttlSecondsAfterFinished", 1e9):
                self._objects.remove("jobs", namespace, name)
            return
        if spec.get("suspend"):
            for pod in pods:
                self._objects.delete("pods", namespace, pod["metadata"]["name"])
            return
        began = self._began.setdefault(uid, time.monotonic())
        done = {index(pod) for pod in pods if pod["status"]["phase"] == "Succeeded"}
        failed = [pod for pod in pods if pod["status"]["phase"] == "Failed"]
        if time.monotonic() > began + spec.get("activeDeadlineSeconds", 1e9):
            self._end(job, pods, "Failed", "DeadlineExceeded", "Job was active longer than specified deadline")
        elif len(failed) > spec.get("backoffLimit", 6):
            self._end(job, pods, "Failed", "BackoffLimitExceeded", "Job has reached the specified backoff limit")
        elif len(done) >= spec.get("completions", 1):
            self._end(job, pods, "Complete", "CompletionsReached", "")
        else:
            there = done | {index(pod) for pod in pods}
            for number in range(spec.get("completions", 1)):
                if number not in there:
                    self._make_pod(job, number)

    def _end(self, job: Object, pods: list[Object], kind: str, reason: str, message: str) -> None:
        self._ended[job["metadata"]["uid"]] = time.monotonic()
        condition = {"type": kind, "status": "True", "reason": reason, "message": message}
        job["status"].setdefault("conditions", []).append(condition)
        for pod in pods:
            if pod["status"]["phase"] not in ENDED:
                self._objects.delete("pods", pod["metadata"]["namespace"], pod["metadata"]["name"])
        self._objects.put("jobs", job["metadata"]["namespace"], job)
        self._objects.event(job, reason, message)

    def _make_pod(self, job: Object, number: int) -> None:
        name = job["metadata"]["name"]
        pod = {"kind": "Pod", "apiVersion": "v1", **copy.deepcopy(job["spec"]["template"])}
        metadata = pod.setdefault("metadata", {})
        metadata |= {"name": f"{name}-{number}-{uuid.uuid4().hex[:5]}", "ownerReferences": owned_by(job)}
        metadata.setdefault("labels", {}).update({"batch.kubernetes.io/job-name": name, INDEX: str(number)})
        metadata.setdefault("annotations", {})[INDEX] = str(number)
        pod["spec"].setdefault("hostname", f"{name}-{number}")
        try:
            self._admit("pods", job["metadata"]["namespace"], pod)
        except Refused as error:
            text = f"Error creating: {error}"
            if not any(each["message"] == text for each in self._objects.of("events")):
                self._objects.event(job, "FailedCreate", text)


def index(pod: Object) -> int:
    return int(pod["metadata"]["annotations"][INDEX])


def is_chosen(one: Object, labels: str, fields: str) -> bool:
    """Whether selectors choose an object."""
    has = one["metadata"].get("labels", {})
    for part in filter(None, labels.split(",")):
        key, equals, value = part.partition("=")
        if key not in has or (equals and has[key] != value.lstrip("=")):
            return False
    for part in filter(None, fields.split(",")):
        key, _, value = part.partition("=")
        found: Any = one
        for step in key.split("."):
            found = (found or {}).get(step)
        if str(found) != value:
            return False
    return True


def merged(one: Object, patch: Object) -> None:
    for key, value in patch.items():
        if value is None:
            one.pop(key, None)
        elif isinstance(value, dict) and isinstance(one.get(key), dict):
            merged(one[key], value)
        else:
            one[key] = json.loads(json.dumps(value))
