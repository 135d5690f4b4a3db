"""What cannot be done, each in one sentence that says what to do, by real kubectl."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from jupyter_distrib.errors import PoolError
from jupyter_distrib.wire import messages as m
from tests.kubernetes.bed import Cluster
from tests.kubernetes.conftest import Open
from tests.kubernetes.test_pods import nested
from tests.processes import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SOON_S = 8.0
"""Seconds in which what is hopeless is refused, on a busy machine; those who do not wait would be refused after ten."""


def refusal(client: Open, size: int = 1, *, wait_s: float = 300.0, **options: str) -> str:
    """The reason for which ranks are refused at once, although one would wait."""
    one = client(**options)
    began_s = time.monotonic()
    refused = one.open(size, wait_s=wait_s)
    assert isinstance(refused, m.WorkerGroupRefused), refused
    assert time.monotonic() < began_s + SOON_S
    return refused.reason


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"image": "nobody/has:this"},
            r"the image nobody/has:this cannot be pulled for pod jd-\S+ \(ImagePullBackOff: failed .*: not found\): correct .*",
        ),
        (
            {"python": "python9"},
            r"the image torch:1 has no python9 \(StartError\): set python to the path of an interpreter with torch there\.",
        ),
        ({"namespace": "nowhere"}, "the cluster has no namespace nowhere: correct namespace, or have it created."),
        ({"context": "nowhere"}, "kubectl has no context nowhere: choose one of `kubectl config get-contexts`."),
        ({"kubectl": "true"}, "true is not kubectl: correct the option kubectl."),
        ({"kubectl": "false"}, "kubectl version failed: nothing."),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_an_option_that_leads_nowhere(cluster: Cluster, client: Open, options: dict[str, str], said: str) -> None:
    assert re.fullmatch(said, reason := refusal(client, **options)), reason
    assert wait_until(lambda: not cluster.get("jobs"), 5), "nothing waits on"


@pytest.mark.parametrize(
    ("verb", "resource", "group"),
    [
        ("create", "jobs", " of batch"),
        ("list", "pods", ""),
        ("create", "pods/exec", ""),
    ],
)
def test_a_role_that_does_not_allow_it(cluster: Cluster, client: Open, verb: str, resource: str, group: str) -> None:
    cluster.do("deny", verb, *resource.split("/"))
    assert refusal(client) == (
        f"Kubernetes does not let system:serviceaccount:team:notebook {verb} {resource} in namespace team: its role "
        f"needs the verb {verb} on {resource}{group}."
    )
    assert wait_until(lambda: not cluster.get("jobs"), 5)


def test_pods_that_may_not_be_watched_are_listed(cluster: Cluster, client: Open) -> None:
    cluster.do("deny", "watch", "pods")
    one = client()
    assert one.run(one.group(1), "rank").values == {0: 0}


def test_events_and_nodes_need_not_be_seen(cluster: Cluster, client: Open) -> None:
    for verb, resource in (("list", "events"), ("list", "nodes"), ("list", "workloads")):
        cluster.do("deny", verb, resource)
    one = client(queue="team-queue")
    one.send(m.OpenWorkerGroup(group="waits", size=1, gpus=False, wait_s=60.0))
    assert re.fullmatch(r"job jd-\S+ is queued in Kueue\.", reason := one.wait(m.WorkerGroupQueued).reason), reason
    cluster.do("admit", cluster.names("jobs")[0])
    assert isinstance(one.wait(m.WorkerGroupOpened, m.WorkerGroupRefused), m.WorkerGroupOpened)


def test_a_quota_that_is_used_up_is_waited_for_and_named(cluster: Cluster, client: Open) -> None:
    cluster.do("quota", "0")
    refused = client().open(1)
    assert isinstance(refused, m.WorkerGroupRefused)
    assert re.fullmatch(
        r"the quota of the namespace is used up \(exceeded quota: team, requested: pods=1, used: pods=0, limited: "
        r"pods=0\)\. Wait for it with --wait S\.",
        refused.reason,
    ), refused.reason


def test_what_a_webhook_does_not_admit(cluster: Cluster, client: Open) -> None:
    cluster.do("webhook", "policy.example")
    assert refusal(client) == (
        'the cluster refuses these pods (admission webhook "policy.example" denied the request: no such image here): '
        "change the options or the template."
    )


def test_pods_that_a_policy_does_not_admit(cluster: Cluster, client: Open) -> None:
    cluster.do("restrict")
    assert refusal(client) == (
        'the cluster refuses these pods (violates PodSecurity "restricted:latest": runAsNonRoot != true): change the '
        "options or the template."
    )
    assert wait_until(lambda: not cluster.get("jobs"), 5), "though the Job itself was taken"


def test_a_cluster_that_is_away(
    cluster: Cluster, client: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = (cluster.folder / "config").read_text().replace(cluster.address, "http://127.0.0.1:9")
    (tmp_path / "config").write_text(config)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    assert re.fullmatch(
        r"Kubernetes does not answer \(.*127\.0\.0\.1:9.* refused.*\): try again later, or correct the context\.",
        reason := refusal(client),
    ), reason
    jobs = Path(os.environ["JUPYTER_DISTRIB_RUNTIME_DIR"]) / "kubernetes-jobs"
    told = subprocess.run(["grep", "-rlF", str(tmp_path), jobs], capture_output=True, text=True, check=False).stdout
    assert wait_until(lambda: not any(map(os.path.exists, told.split())), 20), "no request has arrived anywhere"


def test_no_cluster_is_set(cluster: Cluster, client: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nonexistent")
    assert refusal(client) == "kubectl knows no cluster: name a context (context = ...), or set KUBECONFIG."


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("Client Version: v1.10", "is not kubectl: correct the option kubectl."),
        ('{"clientVersion": {"gitVersion": "v1.19.3"}}', "kubectl 1.19 is too old: install 1.24 or newer."),
    ],
)
def test_a_kubectl_that_is_none_or_too_old(
    cluster: Cluster, client: Open, tmp_path: Path, said: str, reason: str
) -> None:
    (tmp_path / "kubectl").write_text(f"#!/bin/sh\necho {shlex.quote(said)}\n")
    (tmp_path / "kubectl").chmod(0o755)
    assert refusal(client, kubectl=str(tmp_path / "kubectl")).endswith(reason)


def test_a_kubectl_that_is_missing(cluster: Cluster, client: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(PoolError, match="kubernetes pool needs kubectl"):
        client()


def test_sizes_that_are_none(cluster: Cluster, client: Open) -> None:
    one = client()
    one.send(m.OpenWorkerGroup(group="all", size=0, gpus=True))
    reason = one.wait(m.WorkerGroupRefused).reason
    assert reason == "Kubernetes has to be asked for a number of ranks, not 0: write --gpus N or --ranks N."


JOB: dict[str, Any] = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}}
ONE: dict[str, Any] = {"name": "a", "image": "torch:1"}


def of_pod(**spec: Any) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": {"containers": [ONE], **spec}}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("a: [", "is not a Kubernetes object: .* did not find expected node content"),
        ("only text", "is not a Kubernetes object: .*"),
        ("", "is not a Kubernetes object: no objects passed to patch"),
        ({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "x"}}, "is a Service: it has to be a Pod, a Job or a JobSet"),
        ({"apiVersion": "v1", "kind": "List", "items": [of_pod(), of_pod()]}, "has several objects: leave one Pod, Job or JobSet in it"),
        (of_pod(containers=[ONE, {**ONE, "name": "b"}]), "has 2 containers: name the one for the ranks ranks"),
        (of_pod(containers=[]), "has 0 containers: name the one for the ranks ranks"),
        (of_pod(containers=None), "is not a valid Pod, Job or JobSet: .*"),
        (of_pod(containers="many"), "is not a valid Pod, Job or JobSet: .*|has 4 containers: .*"),
        (of_pod(shareProcessNamespace=True), "sets shareProcessNamespace, with which a pod cannot tell .*: remove it"),
        (of_pod(hostPID=True), "sets hostPID, with which a pod cannot tell .*: remove it"),
        (of_pod(volumes=7), "is not a valid Pod, Job or JobSet: .*"),
        (of_pod(containers=[{"name": "a"}]), "names no image for the ranks: set image, there or in the pool"),
        (JOB, "is not a valid Pod, Job or JobSet: .*"),
        ({**JOB, "spec": {"template": []}}, "is not a valid Pod, Job or JobSet: .*"),
    ],
    ids=lambda value: "" if not isinstance(value, str) else value[:20],
)  # fmt: skip
def test_a_template_that_is_none(
    cluster: Cluster, client: Open, tmp_path: Path, content: str | dict[str, Any], said: str
) -> None:
    path = tmp_path / "pod.yaml"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    one = client(template=str(path), image="")
    refused = one.open(1)
    assert isinstance(refused, m.WorkerGroupRefused)
    assert re.fullmatch(rf"the template {re.escape(str(path))} ({said})\.", refused.reason), refused.reason
    assert not cluster.get("jobs")


def test_a_template_that_is_not_there(cluster: Cluster, client: Open, tmp_path: Path) -> None:
    with pytest.raises(PoolError, match=f"there is no file {tmp_path}/none.yaml for the template: correct template."):
        client(template=f"{tmp_path}/none.yaml")


def test_a_job_set_where_there_are_none(cluster: Cluster, client: Open, tmp_path: Path) -> None:
    cluster.do("without_job_sets")
    shutil.rmtree(cluster.environment["KUBECACHEDIR"], ignore_errors=True)  # kubectl knows of them for ten minutes
    (tmp_path / "set.json").write_text(json.dumps(nested("JobSet")))
    reason = refusal(client, template=str(tmp_path / "set.json"))
    assert reason == "the cluster has no JobSets: have its controller installed, or use a Job or Pod as template."
