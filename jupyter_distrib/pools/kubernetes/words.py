"""Sentences on messages of kubectl, and on the states of pods. Pure. Kubernetes 1.24 to 1.37."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from jupyter_distrib.system import outside_text

Object: TypeAlias = Mapping[str, Any]

AWAY = "Kubernetes does not answer"
GONE = "the container there has ended."
LONGEST = 400
"""Maximum number of characters shown of another program's message."""
_FORBIDDEN = re.compile(
    r'User "(?P<user>[^"]+)" cannot (?P<verb>\w+) resource "(?P<resource>[^"]+)"'
    r'(?: in API group "(?P<group>[^"]*)")?(?: in the namespace "(?P<namespace>[^"]+)")?'
)
_UNREACHABLE = re.compile(
    r"Unable to connect to the server: |The connection to the server |dial tcp |net/http: |i/o timeout|"
    r"context deadline exceeded|TLS handshake timeout|EOF$",
    re.MULTILINE,
)
_NO_CONNECTION = re.compile(r"was refused|connection refused|no such host|no route to host")
_LOGIN = (
    "Unauthorized",
    "must be logged in to the server",
    "getting credentials",
    "the server has asked for the client to provide credentials",
)
_NOTHING_SET = ("current-context is not set", "localhost:8080", "no configuration has been provided")
_HOPELESS = (
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
)
"""Reasons for which a container waits for ever."""
_NO_PROGRAM = re.compile(r'exec: "(?P<program>[^"]+)": (?:executable file not found|stat [^:]*: no such file)')
_DISRUPTED = {
    "PreemptionByScheduler": "was preempted by a pod of higher priority",
    "DeletionByTaintManager": "was ended because its node is about to go, or does not answer",
    "EvictionByEvictionAPI": "was evicted, as when its node is drained",
    "DeletionByPodGC": "has lost its node",
    "TerminationByKubelet": "was ended by its node",
}
"""Meanings of the reasons in a pod's condition DisruptionTarget."""
_BY_SIGNAL = (128 + 9, 128 + 15)
"""Exit codes of a container that was ended from outside."""
_WARNINGS = ("FailedCreate", "Stopped", "Suspended", "DeadlineExceeded", "BackoffLimitExceeded")


def last(said: str) -> str:
    """Return the last line of a program's standard error, without `error: ` before it."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return _part(
        re.sub(r"^(error|Error from server \(\w+\)|Error from server): ", "", lines[-1]) if lines else "nothing"
    )


def _part(text: str) -> str:
    return outside_text.shown(text, LONGEST).rstrip(".")


def is_gone(said: str) -> bool:
    """Return whether a command in a pod failed because the pod, or its container, has ended."""
    return bool(re.search(r'pods "[^"]+" not found|container not found|in a completed pod', said))


def failure(verb: str, said: str) -> str:
    """Return a sentence on a kubectl that has failed."""
    return meaning(said) or f"kubectl {verb} failed: {last(said)}."


def meaning(said: str) -> str:
    """Return a sentence on what is wrong and what to do; empty if the cause is unknown."""
    if found := _FORBIDDEN.search(said):
        return _forbidden(found)
    if found := re.search(r'(?:context "|specified context: )([^"\n]+)(?:" does not exist|$)', said, re.MULTILINE):
        return f"kubectl has no context {found[1]}: choose one of `kubectl config get-contexts`."
    if found := re.search(r'namespaces "([^"]+)" not found', said):
        return f"the cluster has no namespace {found[1]}: correct namespace, or have it created."
    if any(words in said for words in _LOGIN):
        return f"Kubernetes does not accept your login ({last(said)}): run `kubectl get pods` in a terminal."
    if any(words in said for words in _NOTHING_SET):
        return "kubectl knows no cluster: name a context (context = ...), or set KUBECONFIG."
    if found := re.search(r'no matches for kind "(\w+)"', said):
        return f"the cluster has no {found[1]}s: have its controller installed, or use a Job or Pod as template."
    if found := re.search(r'(?:admission webhook "[^"]+" denied the request|violates PodSecurity).*', said):
        return f"the cluster refuses these pods ({_part(found[0])}): change the options or the template."
    if "exceeded quota" in said:
        return f"the quota of the namespace is used up ({_part(said[said.index('exceeded quota') :])})."
    if found := re.search(r"is invalid: (.*)", said):
        return f"Kubernetes refuses these pods ({_part(found[1])}): correct the options or the template."
    if found := _UNREACHABLE.search(last(said)):
        return f"{AWAY} ({_part(last(said)[found.start() :])}): try again later, or correct the context."
    return ""


def may_have_arrived(failure: str) -> bool:
    """Return whether a request that failed with this sentence may have been carried out, or may still be."""
    return failure.startswith(AWAY) and not _NO_CONNECTION.search(failure)


def _forbidden(found: re.Match[str]) -> str:
    user, verb, resource = found["user"], found["verb"], found["resource"]
    group = f" of {found['group']}" if found["group"] else ""
    where = f" in namespace {found['namespace']}" if found["namespace"] else ""
    return (
        f"Kubernetes does not let {_part(user)} {verb} {resource}{where}: its role needs the verb {verb} on "
        f"{resource}{group}."
    )


# ------------------------------------------------------------------------------------------------ pods


def name(of: Object) -> str:
    """Return the name of an object."""
    return str(of["metadata"]["name"])


def index(pod: Object) -> int:
    """Return the pod's number in its Job."""
    metadata = pod["metadata"]
    key = "batch.kubernetes.io/job-completion-index"
    found = {**(metadata.get("labels") or {}), **(metadata.get("annotations") or {})}.get(key, "0")
    return int(found) if str(found).isdecimal() else 0


def runs(pod: Object, container: str) -> bool:
    """Return whether commands can be run in a container."""
    return (
        _status(pod).get("phase") == "Running"
        and "deletionTimestamp" not in pod["metadata"]
        and any("running" in (each.get("state") or {}) for each in _containers(pod) if each.get("name") == container)
    )


def has_node(pod: Object) -> bool:
    """Return whether the pod has a node, so that only its own start is left."""
    return bool((pod.get("spec") or {}).get("nodeName"))


def has_ended(pod: Object) -> bool:
    """Return whether the pod has ended, so that its node's resources are free again."""
    return _status(pod).get("phase") in ("Succeeded", "Failed")


def waiting(pods: Sequence[Object]) -> str:
    """Return a sentence on what pods wait for: `no node has room for pod p: ...`; empty if they only have to start."""
    for pod in pods:
        for each in _status(pod).get("conditions") or ():
            if each.get("type") == "PodScheduled" and each.get("status") == "False" and not has_node(pod):
                return f"no node has room for pod {name(pod)} ({_part(each.get('message') or each.get('reason', ''))})"
    for pod in pods:
        if not has_node(pod):
            return f"pod {name(pod)} waits for a node"
    return ""


def starting(pods: Sequence[Object], container: str) -> str:
    """Return a phrase on a pod that does not run yet: `pod p on node n is starting (ContainerCreating)`."""
    for pod in pods:
        if not runs(pod, container):
            reasons = [(each.get("state") or {}).get("waiting", {}).get("reason", "") for each in _containers(pod)]
            reason = next(filter(None, reasons), "")
            return f"pod {name(pod)}{_on(pod)} is starting{f' ({_part(reason)})' if reason else ''}"
    return ""


def hopeless(pods: Sequence[Object]) -> str:
    """Return why a pod will not start, however long one waits; empty if it may."""
    for pod in pods:
        for each in _containers(pod):
            wait = (each.get("state") or {}).get("waiting") or {}
            if wait.get("reason") in _HOPELESS:
                return _not_started(pod, each, str(wait["reason"]), str(wait.get("message", "")))
        if _status(pod).get("phase") in ("Failed", "Succeeded"):
            for each in _containers(pod):
                end = (each.get("state") or {}).get("terminated") or {}
                if end.get("reason") in ("StartError", "ContainerCannotRun"):
                    return _not_started(pod, each, str(end["reason"]), str(end.get("message", "")))
            return f"{ended(pod)}."
    return ""


def _not_started(pod: Object, container: Object, reason: str, message: str) -> str:
    image = str(container.get("image", ""))
    if found := _NO_PROGRAM.search(message):
        return (
            f"the image {image} has no {found['program']} ({reason}): set python to the path of an interpreter with "
            "torch there."
        )
    if "Image" in reason:
        how = f"{reason}: {_part(message)}" if message else reason
        return (
            f"the image {image} cannot be pulled for pod {name(pod)} ({how}): correct image, or allow it to be pulled."
        )
    return f"pod {name(pod)}{_on(pod)} cannot start ({reason}: {_part(message)}): change the options or the template."


def ended(pod: Object) -> str:
    """Return a sentence on how a pod has ended, or is about to: `pod p on node n was evicted: ...`; empty if it has
    not."""
    who, status = f"pod {name(pod)}{_on(pod)}", _status(pod)
    for each in status.get("conditions") or ():
        if each.get("type") == "DisruptionTarget" and each.get("status") == "True":
            how = _DISRUPTED.get(each.get("reason", ""), "was ended by the cluster")
            return f"{who} {'was evicted' if status.get('reason') == 'Evicted' else how}{_said(each, status)}"
    match status.get("reason"):
        case "Evicted":
            return f"{who} was evicted{_said(status)}"
        case "DeadlineExceeded":
            return f"{who} has reached its time limit"
        case "NodeLost" | "NodeShutdown" | "Terminated" | "Shutdown" as reason:
            return f"{who} has lost its node ({reason}){_said(status)}"
    for each in _containers(pod):
        if end := (each.get("state") or {}).get("terminated"):
            if end.get("reason") == "OOMKilled":
                return (
                    f"{who} was ended because it used more memory than it may (OOMKilled): ask for more by memory = ..."
                )
            if end.get("reason") == "Completed":
                return f"{who} has ended by itself, since nothing was connected to it"  # see `keeper`
            if "deletionTimestamp" in pod["metadata"] and end.get("exitCode") in _BY_SIGNAL:
                return f"{who} was deleted"
            return f"{who} has ended ({_part(str(end.get('reason', '')))}, exit code {end.get('exitCode')})"
    if status.get("phase") in ("Failed", "Succeeded"):
        return f"{who} has ended{_said(status)}"
    return f"{who} was deleted" if "deletionTimestamp" in pod["metadata"] else ""


def end_of(pods: Iterable[Object]) -> str:
    """Return how pods have ended, from the most informative one: the others ended because of it."""
    found = [text for pod in sorted(pods, key=index) if (text := ended(pod))]
    return next((text for text in found if not is_vague(text)), found[0] if found else "")


def is_vague(text: str) -> bool:
    """Return whether a pod's end explains nothing: it was ended from outside."""
    return text.endswith(("was deleted", *(f"exit code {code})" for code in _BY_SIGNAL)))


def _on(pod: Object) -> str:
    node = (pod.get("spec") or {}).get("nodeName")
    return f" on node {node}" if node else ""


def _said(*found: Object) -> str:
    message = next(filter(None, (each.get("message") for each in found)), "")
    return f" ({_part(str(message))})" if message else ""


def _status(pod: Object) -> Object:
    return pod.get("status") or {}


def _containers(pod: Object) -> list[Object]:
    status = _status(pod)
    return [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]


# ------------------------------------------------------------------------------------------------ jobs


def warning(events: Sequence[Object]) -> str:
    """Return the message of the last event of a Job that says why it has no pods."""
    warnings = [each for each in events if each.get("reason") in _WARNINGS]
    text = str(warnings[-1].get("message", "")) if warnings else ""
    return meaning(text) or (f"{_part(text)}." if text else "")


def refused(events: Sequence[Object]) -> str:
    """Return why no pod of a Job will ever be admitted; empty if one may be. A quota may have room later."""
    for each in events:
        message = str(each.get("message", ""))
        if each.get("reason") == "FailedCreate" and "exceeded quota" not in message:
            found = re.search(r"is forbidden: (.*)|(violates PodSecurity.*|admission webhook.*)", message)
            if found:
                why = _part(found[1] or found[2])
                return f"the cluster refuses these pods ({why}): change the options or the template."
    return ""


def admission(workloads: Sequence[Object]) -> str:
    """Return why Kueue does not let a Job begin, by its Workload."""
    for workload in workloads:
        for each in (workload.get("status") or {}).get("conditions") or ():
            if each.get("type") == "QuotaReserved" and each.get("status") == "False":
                return _part(str(each.get("message", "")))
    return ""
