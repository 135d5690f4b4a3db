"""The notebook's own pod, if it runs in one: the cluster itself deletes objects that the pod owns along with it."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from jupyter_distrib.errors import PoolError
from jupyter_distrib.pools.kubernetes.kubectl import Kubectl

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Folder with the account of a pod; pods without one cannot reach the cluster."""


def find(kubectl: Kubectl) -> dict[str, Any] | None:
    """Return the reference to this pod; None outside of a pod, or if the pod is not allowed to look itself up.

    The pod is looked up where the new object will be: the cluster would delete an object at once whose owner is in
    another namespace or cluster.
    """
    try:
        here = (ACCOUNT / "namespace").read_text().strip()
    except OSError:
        return None
    if kubectl.namespace and kubectl.namespace != here:
        return None
    name = socket.gethostname()
    with suppress(PoolError, KeyError, TypeError):
        metadata = kubectl.asked("pod", name)["metadata"]
        if metadata["namespace"] == here:
            return {"apiVersion": "v1", "kind": "Pod", "name": name, "uid": metadata["uid"]}
    return None
