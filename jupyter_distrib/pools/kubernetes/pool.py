"""Ranks in pods of a Job that is made for them by the user's kubectl, with `kubectl exec` as the way to each pod."""

from __future__ import annotations

import os
import shlex
import shutil
from concurrent.futures import Future
from typing import TYPE_CHECKING, ClassVar

from jupyter_distrib.errors import PoolError
from jupyter_distrib.options import Option, count, duration, one_line
from jupyter_distrib.pools.command.hosts_pool import SHARED, HostsPool
from jupyter_distrib.pools.kubernetes import readers

if TYPE_CHECKING:
    from jupyter_distrib.pools.kubernetes.reservation import KubernetesCluster
    from jupyter_distrib.system.call_soon import CallSoon
    from jupyter_distrib.system.event_loop import Loop


class KubernetesPool(HostsPool):
    """The pool of a Kubernetes cluster, whose hosts are the pods of a Job."""

    kind = "kubernetes"
    engine = "Kubernetes"
    needed: ClassVar = {}
    options: ClassVar = (
        Option(
            flag="--image", metavar="IMAGE", meaning="the image of the pods, with torch", read=readers.image, main=True
        ),
        Option(
            flag="--template",
            metavar="PATH",
            meaning="a file with a Pod, Job or JobSet as the template of the pods",
            read=one_line,
        ),
        Option(
            flag="--namespace",
            metavar="NAME",
            meaning="the namespace",
            read=readers.name,
            default="kubectl's",
            main=True,
        ),
        Option(
            flag="--context",
            metavar="NAME",
            meaning="the context",
            read=readers.context,
            default="kubectl's",
            main=True,
        ),
        Option(
            flag="--gpus-per-pod",
            metavar="N",
            meaning="GPUs, and thus ranks, per pod",
            read=count,
            default="all in one pod, or spread over the nodes",
        ),
        Option(
            flag="--gpu-resource",
            metavar="NAME",
            meaning="the resource that is one GPU",
            read=readers.resource,
            default="nvidia.com/gpu",
        ),
        Option(flag="--cpu", metavar="CORES", meaning="cores of each pod", read=readers.cores, default="the cluster's"),
        Option(
            flag="--memory",
            metavar="SIZE",
            meaning="memory of each pod: 64Gi",
            read=readers.size,
            default="the cluster's",
        ),
        Option(
            flag="--shm",
            metavar="SIZE",
            meaning="the largest size of /dev/shm",
            read=readers.size,
            default="half of the memory",
        ),
        Option(flag="--queue", metavar="NAME", meaning="the local queue of Kueue", read=readers.name),
        Option(
            flag="--service-account",
            metavar="NAME",
            meaning="the service account of the pods",
            read=readers.name,
            default="the namespace's",
        ),
        Option(flag="--time", metavar="TIME", meaning="the time limit of the pods: 90m, 2h", read=duration),
        Option(
            flag="--kubectl",
            metavar="COMMAND",
            meaning="the command for kubectl",
            read=readers.command,
            default="kubectl",
        ),
        *SHARED,
    )

    def __init__(self, **given: str) -> None:
        super().__init__(**{"kubectl": "kubectl", **given})

    def check_complete(self) -> None:
        super().check_complete()
        if not {"image", "template"} & self.given.keys():
            raise PoolError(
                "this pool needs an image with torch: write --image NAME, or image = ... in a settings file."
            )

    def check(self) -> dict[str, str]:
        given = self.given
        if shutil.which(program := shlex.split(given["kubectl"])[0]) is None:
            raise PoolError(f"the kubernetes pool needs {program}, which is not installed here: install kubectl.")
        if path := given.get("template", ""):
            path = os.path.abspath(os.path.expanduser(path))
            if not os.path.isfile(path):
                raise PoolError(f"there is no file {path} for the template: correct template.")
            given = given | {"template": path}
        # Another kubeconfig may be another cluster, which the coordinator of this one does not know.
        return given | {"kubeconfig": os.environ.get("KUBECONFIG", "")}

    def try_out(self) -> str:
        """Return a sentence on the cluster; creates nothing there. Raises `PoolError`."""
        from jupyter_distrib.pools.kubernetes.kubectl import Kubectl
        from jupyter_distrib.pools.kubernetes.report import missing_rights

        self.check_complete()
        self.check()
        kubectl = Kubectl(self.given)
        kubectl.check()
        if missing := missing_rights(kubectl):
            raise PoolError(f"Kubernetes answers, but your role does not allow {', '.join(missing)} there.")
        return f"{self.title} answers, and your role may start Jobs there."

    @property
    def title(self) -> str:
        namespace = self.given.get("namespace", "")
        return f"Kubernetes, namespace {namespace}" if namespace else "Kubernetes"

    def reach(self, loop: Loop, calls: CallSoon, archive: Future[bytes]) -> KubernetesCluster:
        from jupyter_distrib.pools.kubernetes.reservation import KubernetesCluster

        return KubernetesCluster(self.given, loop, calls, archive)
