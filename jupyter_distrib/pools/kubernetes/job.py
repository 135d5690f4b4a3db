"""Creates the Job of one worker group, waits until its pods run, and has it deleted. Blocks, in the thread of
`acquire`."""

from __future__ import annotations

import calendar
import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from jupyter_distrib.errors import PoolError
from jupyter_distrib.pools.command.hosts import Host
from jupyter_distrib.pools.kubernetes import keeper, manifest, owner, template, words
from jupyter_distrib.pools.kubernetes.company import Company
from jupyter_distrib.pools.kubernetes.guard import Guard
from jupyter_distrib.pools.kubernetes.kubectl import Kubectl, KubectlFailed
from jupyter_distrib.pools.kubernetes.watch import Watch

AT_ONCE_S = 10.0
"""Seconds in which pods get their nodes, for commands that do not wait."""
START_S = 1800.0
"""Seconds in which pods that have their nodes start: images may have many gigabytes."""
LOOK_S = 1.0
ASK_S = 2.0
"""Seconds between queries about a Job that has no pods."""
WHY_S = 3.0
"""Seconds in which the cluster has to answer a query."""
SETTLE_S = 1.0
"""Maximum seconds to wait until the cluster says how a pod has ended."""
GIVEN_UP = "the request was cancelled before the ranks started."
_WAIT_FOR_IT = "Wait for it with --wait S."


class PodJob:
    """One Job, or JobSet, from its making until it is deleted.

    Args:
        options: The pool's.
        say: Called with what the cell waits for.
        given_up: Set when nobody wants the Job any more.
    """

    def __init__(
        self, kubectl: Kubectl, options: Mapping[str, str], say: Callable[[str], None], given_up: threading.Event
    ) -> None:
        self._kubectl, self._options, self._say, self._given_up = kubectl, options, say, given_up
        self.name = self.container = self._resource = self._said = ""
        self.deadline_s: float | None = None
        """Time at which the cluster ends the pods, by `time.monotonic`."""
        self._object: dict[str, Any] = {}
        self._guard: Guard | None = None
        self._watch: Watch | None = None
        self.company = Company()

    @property
    def kubectl(self) -> Kubectl:
        """The kubectl for the Job's namespace."""
        return self._kubectl

    # ------------------------------------------------------------------------------------------ making it

    def start(self, size: int, *, gpus: bool, wait_s: float, title: str) -> tuple[Host, ...]:
        """Create the Job, and wait for its pods; return them. Raises `PoolError`."""
        found = template.read(path, self._kubectl) if (path := self._options.get("template", "")) else template.none()
        if "namespace" not in self._options:
            self._kubectl = self._kubectl.of_namespace(found.namespace)
        shape = manifest.shape(self._options, size, gpus=gpus)
        self.name = manifest.object_name(title, secrets.token_hex(4))
        self._resource = "jobsets.jobset.x-k8s.io" if found.job_set is not None else "jobs.batch"
        try:
            made = manifest.made(self._options, found, self.name, shape, owner.find(self._kubectl))
            self.container = found.container["name"]
            limit_s = manifest.deadline_s(made, found)
        except (AttributeError, KeyError, TypeError, ValueError):
            raise template.malformed(path) from None
        if not (self._options.get("image") or found.container.get("image")):
            raise PoolError(f"the template {path} names no image for the ranks: set image, there or in the pool.")
        self._create(made)
        pods = self._started(shape.pods, wait_s)
        if limit_s:
            self.deadline_s = time.monotonic() + limit_s - _age_s(pods)
        return tuple(Host(name=words.name(pod), slots=shape.ranks) for pod in pods)

    def _create(self, made: dict[str, Any]) -> None:
        self._guard = guard = Guard(self._kubectl, self._resource, self.name)
        text = json.dumps(made).encode()
        try:
            # Validation would first load the descriptions of all objects.
            created = self._kubectl.output("create", "--validate=false", "--output=json", "-f", "-", given=text)
        except KubectlFailed as error:
            if not words.may_have_arrived(str(error)):
                guard.send_outcome("refused")
            raise
        guard.send_outcome("created")
        with suppress(ValueError):
            self._object = json.loads(created)
        self._watch = Watch(self._kubectl, f"{manifest.REQUEST}={self.name}")

    # ------------------------------------------------------------------------------------------ waiting for pods

    def _started(self, wanted: int, wait_s: float) -> list[Any]:
        """Wait until all pods run; return them."""
        assert self._watch is not None
        seen, asked_s, reason = -1, 0.0, ""
        until_s = time.monotonic() + max(wait_s, AT_ONCE_S)
        placed_until_s = None
        while True:
            seen = self._watch.wait(seen, LOOK_S)
            if self._given_up.is_set():
                raise PoolError(GIVEN_UP)
            pods = self._watch.pods()
            if text := words.hopeless(pods):
                raise PoolError(text)
            self._keep(pods)
            now_s = time.monotonic()
            if len(pods) >= wanted and all(map(words.has_node, pods)):
                if all(words.runs(pod, self.container) for pod in pods):
                    return pods
                reason = f"{words.starting(pods, self.container)}."
                placed_until_s = placed_until_s or now_s + max(wait_s, START_S)
                if now_s > placed_until_s:
                    raise PoolError(f"{reason} The wait ended after {max(wait_s, START_S):.0f} s.")
            else:
                if now_s > asked_s + ASK_S:
                    reason, asked_s = self._why(pods), now_s
                if now_s > until_s:
                    raise PoolError(f"{reason or f'job {self.name} has no pods yet.'} {_WAIT_FOR_IT}")
            self._say_once(reason)

    def _keep(self, pods: Sequence[Any]) -> None:
        for pod in pods:
            if words.runs(pod, self.container):
                self.company.keep(words.name(pod), self.exec(words.name(pod), keeper.company(self._options["python"])))

    def exec(self, pod: str, python: Sequence[str]) -> list[str]:
        """Return the words of a command in a pod."""
        return self._kubectl.words("exec", "--stdin", pod, f"--container={self.container}", "--", *python)

    def _say_once(self, reason: str) -> None:
        if reason and reason != self._said:
            self._said = reason
            self._say(reason)

    def _why(self, pods: Sequence[Any]) -> str:
        """Return what the cell waits for, as far as the cluster shows it: anything that the user may not see is left
        out."""
        if text := words.waiting(pods):
            more = "; a node is being added" if any(map(self._adds_node, pods)) else ""
            return f"{text}{more}."
        if pods:
            return f"job {self.name} has {len(pods)} of its pods."
        events: list[Any] = []
        with suppress(PoolError):
            events = self._events(self.name)
        if text := words.refused(events):
            raise PoolError(text)
        if text := words.warning(events):
            return text
        if manifest.QUEUE not in ((self._object.get("metadata") or {}).get("labels") or {}):
            return ""
        admission = ""
        with suppress(PoolError):
            uid = self._object["metadata"]["uid"]
            selector = f"--selector=kueue.x-k8s.io/job-uid={uid}"
            found = self._kubectl.asked("workloads.kueue.x-k8s.io", selector, limit_s=WHY_S)
            admission = words.admission(found["items"])
        return f"job {self.name} is queued in Kueue{f' ({admission})' if admission else ''}."

    def _adds_node(self, pod: Any) -> bool:
        with suppress(PoolError):
            return any(each.get("reason") == "TriggeredScaleUp" for each in self._events(words.name(pod)))
        return False

    def _events(self, name: str) -> list[Any]:
        chosen = f"--field-selector=involvedObject.name={name}"
        found: list[Any] = self._kubectl.asked("events", chosen, limit_s=WHY_S)["items"]
        return sorted(found, key=lambda each: each.get("lastTimestamp") or each.get("eventTime") or "")

    # ------------------------------------------------------------------------------------------ its end

    def is_another_waiting(self) -> bool:
        """Return whether pods of another worker group wait for a node, as far as the cluster shows it."""
        with suppress(PoolError, KeyError, TypeError):
            pods = self._kubectl.asked("pods", f"--selector={manifest.REQUEST}", limit_s=WHY_S)["items"]
            return not all(map(words.has_node, pods))
        return False

    def end_of(self) -> str:
        """Return how it, or one of its pods, has ended; empty if it goes on, or if the cluster does not answer soon."""
        if self._watch is None:
            return ""
        found = self._watch.end_of(SETTLE_S)
        if found and not words.is_vague(found):
            return found
        with suppress(PoolError):
            try:
                job = self._kubectl.asked(self._resource, self.name, limit_s=SETTLE_S * 3)
            except KubectlFailed as error:
                return f"job {self.name} was deleted" if "NotFound" in error.said else found
            suspended = bool(job["spec"].get("suspend"))
            conditions = (job.get("status") or {}).get("conditions") or ()
            if any(each.get("reason") == "DeadlineExceeded" for each in conditions):
                return f"job {self.name} has reached its time limit"
            if suspended:
                why = words.warning(self._events(self.name)).rstrip(".")
                return f"job {self.name} was suspended{f' ({why})' if why else ''}"
        return found

    def release(self) -> None:
        """Delete the Job, or arrange its deletion for when the cluster answers. Never raises."""
        self.company.leave()
        watch, self._watch = self._watch, None
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.release()
        if watch is not None:
            watch.close()


def _age_s(pods: Sequence[Any]) -> float:
    """Return the age of the oldest pod, by the clocks of both sides; at most an hour, since they may differ."""
    age_s = 0.0
    for pod in pods:
        with suppress(KeyError, ValueError):
            created = pod["metadata"]["creationTimestamp"]
            age_s = max(age_s, time.time() - _utc_s(created))
    return min(max(age_s, 0.0), 3600.0)


def _utc_s(text: str) -> float:
    return float(calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%SZ")))
