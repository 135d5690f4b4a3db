"""Pods of a Job by real kubectl: what is created, what becomes of it, and how its end is told."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from jupyter_distrib.pools.kubernetes.job import PodJob
from jupyter_distrib.pools.kubernetes.kubectl import Kubectl
from jupyter_distrib.pools.kubernetes.reservation import KubernetesCluster
from jupyter_distrib.system.call_soon import CallSoon
from jupyter_distrib.system.event_loop import Loop
from jupyter_distrib.testing import PoolClient
from jupyter_distrib.wire import messages as m
from tests.kubernetes.bed import IMAGE, Cluster
from tests.kubernetes.conftest import Open
from tests.processes import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SUM = """\
import socket, torch, torch.distributed as dist
t = torch.ones(1)
dist.all_reduce(t)
(socket.gethostname(), int(t))"""
FOR_EVER = """\
import time
while True:
    time.sleep(0.01)"""
LOADER = """
import torch
from torch.utils.data import DataLoader
data = [torch.zeros(24_000_000) for _ in range(2)]
sum(len(batch) for batch in DataLoader(data, batch_size=1, num_workers=2))
"""


def test_an_image_is_enough_for_ranks_that_reach_one_another_in_pods(cluster: Cluster, client: Open) -> None:
    one = client(nodes="2")
    group = one.group(4)
    outcome = one.run(group, SUM, strategy="ddp")
    assert [value[1] for value in outcome.values.values()] == [4] * 4
    assert [value[0][-2:] for value in outcome.values.values()] == ["-0", "-0", "-1", "-1"]
    [job] = cluster.get("jobs")
    assert job["metadata"]["name"].startswith("jd-contract-suite-")
    [container] = job["spec"]["template"]["spec"]["containers"]
    assert "resources" not in container
    assert "suspend" not in job["spec"]
    assert len(cluster.get("pods")) == 2
    assert one.run(group, "rank").values == {rank: rank for rank in range(4)}
    assert cluster.get("jobs")[0]["metadata"]["uid"] == job["metadata"]["uid"], "the next cell starts no pod"


def test_values_of_many_megabytes_go_in_and_out(cluster: Cluster, client: Open) -> None:
    big = bytes(range(256)) * 150_000
    one = client(copy_files="")
    outcome = one.run(one.group(1), "big + big[:1]", inputs={"big": bytearray(big)})
    assert hashlib.sha256(outcome.values[0]).digest() == hashlib.sha256(big + big[:1]).digest()


def test_a_dataloader_with_workers_has_room_in_shared_memory(cluster: Cluster, client: Open) -> None:
    one = client(shm="1Gi")
    group = one.group(1)
    assert one.run(group, LOADER).values == {0: 2}
    size = dedent("""\
        import os
        s = os.statvfs('/dev/shm')
        s.f_frsize * s.f_blocks""")
    assert one.run(group, size).values == {0: 1 << 30}


POD = """
apiVersion: v1
kind: Pod
metadata:
  name: of-the-team
  labels: {team: vision}
spec:
  tolerations: [{key: nvidia.com/gpu, operator: Exists}]
  containers:
  - name: sidecar
    image: torch:1
  - name: ranks
    image: torch:1
    command: [sleep, infinity]
    args: [more]
    env: [{name: MINE, value: "yes"}]
    resources: {limits: {rdma/ib: "1"}}
    volumeMounts: [{name: data, mountPath: /data}]
  volumes: [{name: data, persistentVolumeClaim: {claimName: data}}]
"""


def nested(kind: str) -> dict[str, Any]:
    """A Job, or a JobSet with a part beside the one for the ranks."""
    container = {"name": "main", "image": IMAGE, "env": [{"name": "MINE", "value": "yes"}]}
    pod = {"metadata": {"labels": {"team": "vision"}}, "spec": {"containers": [container], "priorityClassName": "low"}}
    job = {"spec": {"template": pod, "activeDeadlineSeconds": 240, "completions": 7}}
    if kind == "Job":
        return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **job}
    idle = {"name": "ps", "replicas": 0, "template": {"spec": {"template": {"spec": {"containers": [container]}}}}}
    parts = {"replicatedJobs": [idle, {"name": "ranks", "replicas": 3, "template": job}]}
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": "x"}, "spec": parts}


@pytest.mark.parametrize("kind", ["Job", "JobSet"])
def test_pods_start_from_a_template(cluster: Cluster, client: Open, tmp_path: Path, kind: str) -> None:
    (tmp_path / "team.json").write_text(json.dumps(nested(kind)))
    one = client(template=str(tmp_path / "team.json"), nodes="2")
    group = one.group(2)
    outcome = one.run(group, "'MINE=yes' in open('/proc/self/environ').read().split(chr(0))")
    assert outcome.values == {0: True, 1: True}
    [note] = outcome.of(m.Noted)
    assert re.fullmatch(r"these ranks reach the time limit in 3 min \d+ s: .*", note.text), note.text
    pods = cluster.get("pods")
    assert [pod["metadata"]["labels"]["team"] for pod in pods] == ["vision"] * 2
    assert [pod["spec"]["priorityClassName"] for pod in pods] == ["low"] * 2
    cluster.do("evict", pods[0]["metadata"]["name"])
    one.wait(m.WorkerGroupClosed)
    plural = {"Job": "jobs", "JobSet": "jobsets"}[kind]
    assert wait_until(lambda: not cluster.get(plural), 30), "the object of the template's kind is deleted"


def test_what_a_pod_template_has_arrives_as_it_is(cluster: Cluster, client: Open, tmp_path: Path) -> None:
    (tmp_path / "team.yaml").write_text(POD)
    one = client(template=str(tmp_path / "team.yaml"), image="empty:1", python="/none/python", cpu="2", memory="4Gi")
    assert isinstance(one.open(1), m.WorkerGroupRefused)
    template = cluster.history("jobs")[-1]["spec"]["template"]
    assert template["metadata"]["labels"]["team"] == "vision"
    pod = template["spec"]
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    sidecar, ranks = pod["containers"]
    assert sidecar == {"name": "sidecar", "image": "torch:1"}
    assert ranks["image"] == "empty:1"
    assert "args" not in ranks
    assert ranks["env"] == [{"name": "MINE", "value": "yes"}]
    assert ranks["resources"]["limits"] == {"rdma/ib": "1", "cpu": "2", "memory": "4Gi"}
    assert [mount["mountPath"] for mount in ranks["volumeMounts"]] == ["/data", "/dev/shm"]


# ------------------------------------------------------------------------------------------------ queues and waiting


def test_a_job_in_a_queue_waits_and_says_why(cluster: Cluster, client: Open) -> None:
    one = client(queue="team-queue")
    one.send(m.OpenWorkerGroup(group="waits", size=1, gpus=False, wait_s=60.0))
    reason = one.wait(m.WorkerGroupQueued).reason
    assert re.fullmatch(r"job jd-\S+ is queued in Kueue \(couldn't assign flavors .* 8 more needed\)\.", reason), reason
    [job] = cluster.get("jobs")
    assert job["spec"]["suspend"] is True
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-queue"
    cluster.do("admit", job["metadata"]["name"])
    opened = one.wait(m.WorkerGroupOpened, m.WorkerGroupRefused)
    assert isinstance(opened, m.WorkerGroupOpened), opened
    assert one.run(opened, "rank").values == {0: 0}


def test_who_does_not_wait_is_refused_soon_and_leaves_no_job(cluster: Cluster, client: Open) -> None:
    one = client(queue="team-queue")
    refused = one.open(1)
    assert isinstance(refused, m.WorkerGroupRefused)
    assert re.fullmatch(r"job jd-\S+ is queued in Kueue \(.*\)\. Wait for it with --wait S\.", refused.reason)
    assert wait_until(lambda: not cluster.get("jobs"), 5)


def test_a_pod_that_waits_for_others_does_not_end_and_none_stays_when_one_gives_up(
    cluster: Cluster, client: Open
) -> None:
    cluster.do("quota", "1")
    one = client(nodes="2")
    one.send(m.OpenWorkerGroup(group="waits", size=2, gpus=False, wait_s=300.0))
    assert wait_until(lambda: "has 1 of its pods" in one.wait(m.WorkerGroupQueued).reason, 30)
    [pod] = cluster.get("pods")
    assert wait_until(lambda: pod["metadata"]["name"] in cluster.connected(), 10), "a command that keeps it"
    cluster.do("quota", "2")
    opened = one.wait(m.WorkerGroupOpened, m.WorkerGroupRefused)
    assert isinstance(opened, m.WorkerGroupOpened), opened
    assert wait_until(lambda: sorted(cluster.connected().values()) == [1, 1], 10), "only the relays are left"


def test_kubectl_may_be_behind_a_program_and_nothing_of_it_is_left(
    cluster: Cluster, client: Open, tmp_path: Path
) -> None:
    program = tmp_path / "their kubectl"
    program.write_text('#!/bin/sh\nkubectl --as=ada "$@"\n')
    program.chmod(0o755)
    one = client(kubectl=f"'{program}'", idle="5")
    one.run(group := one.group(1), "rank")
    assert len(of_kubectl()) > 1
    cluster.do("evict", cluster.names("pods")[0])
    assert one.wait(m.WorkerGroupClosed).group == group.group
    assert wait_until(lambda: not of_kubectl(), 20)


def of_kubectl() -> list[str]:
    """The command lines of this program's kubectl that run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            line = path.read_bytes().decode()
            if "kubectl\0--as=ada" in line:
                found.append(line)
    return found


def test_pods_without_a_node_are_reported_with_the_schedulers_words(cluster: Cluster, client: Open) -> None:
    one = client(gpus_per_pod="3")
    one.send(m.OpenWorkerGroup(group="large", size=9, gpus=True))
    queued = one.wait(m.WorkerGroupQueued)
    assert re.fullmatch(
        r"no node has room for pod jd-\S+-2-\w+ \(0/2 nodes are available: 2 Insufficient nvidia.com/gpu.*\)\.",
        queued.reason,
    ), queued.reason
    pods = [pod["spec"]["containers"][0]["resources"] for pod in cluster.get("pods")]
    assert pods == [{"limits": {"nvidia.com/gpu": "3"}, "requests": {"nvidia.com/gpu": "3"}}] * 3
    [waits] = [pod["metadata"]["name"] for pod in cluster.get("pods") if "nodeName" not in pod["spec"]]
    cluster.do("scale_up", waits)
    refused = one.wait(m.WorkerGroupRefused)
    assert refused.reason.endswith("; a node is being added. Wait for it with --wait S."), refused.reason
    assert wait_until(lambda: not cluster.get("jobs"), 5)


def test_pods_that_are_free_make_room_for_another_notebook(cluster: Cluster, client: Open) -> None:
    """They would stay for as long as the other one waits."""
    one, other = client(gpus_per_pod="3"), client(gpus_per_pod="3")
    one.send(m.OpenWorkerGroup(group="first", size=6, gpus=True))
    one.close_group(one.wait(m.WorkerGroupOpened))
    [held] = cluster.names("jobs")
    job = PodJob(Kubectl({"kubectl": "kubectl"}), {}, str, threading.Event())
    assert not job.is_another_waiting(), "the pods have nodes"
    other.send(m.OpenWorkerGroup(group="second", size=6, gpus=True, wait_s=60.0))
    assert wait_until(lambda: job.is_another_waiting() or held not in cluster.names("jobs"), 20)
    other.wait(m.WorkerGroupOpened)


def test_the_nodes_of_free_pods_are_wanted_while_others_have_none(cluster: Cluster, client: Open) -> None:
    loop = Loop()
    calls = CallSoon(loop)
    of = KubernetesCluster({"kubectl": "kubectl"}, loop, calls, Future())
    opening = m.OpenWorkerGroup(group="first", size=6, gpus=True)
    of_nobody = dict.fromkeys(("session", "label", "python", "torch", "cloudpickle"), "")
    reservation = of.reserve(opening, m.Hello(protocol=m.PROTOCOL, pid=0, **of_nobody), str)
    try:
        full = client(gpus_per_pod="3")
        full.send(opening)
        full.wait(m.WorkerGroupOpened)
        assert not reservation.is_room_wanted()
        waits = client(gpus_per_pod="3")
        waits.send(m.OpenWorkerGroup(group="second", size=6, gpus=True, wait_s=60.0))
        assert wait_until(reservation.is_room_wanted, 20)
    finally:
        reservation.release(keep_agents=False)
        calls.close()
        loop._selector.close()


# ------------------------------------------------------------------------------------------------ losses

Do = Callable[[Cluster, str, str], None]
LOSSES: dict[str, tuple[Do, str]] = {
    "evicted": (
        lambda cluster, pod, job: cluster.do("evict", pod),
        r"pod jd-\S+ on node n\d was evicted \(The node was low on resource: memory\. .*\)",
    ),
    "out of memory": (
        lambda cluster, pod, job: cluster.do("use_up_memory", pod),
        r"pod jd-\S+ on node n\d was ended because it used more memory than it may \(OOMKilled\): ask for more .*",
    ),
    "preempted": (
        lambda cluster, pod, job: cluster.do("preempt", pod),
        r"pod jd-\S+ on node n\d was preempted by a pod of higher priority \(.*\)",
    ),
    "its node lost": (
        lambda cluster, pod, job: cluster.do("lose_node", pod),
        r"pod jd-\S+ on node n\d was ended because its node is about to go, or does not answer \(.*\)",
    ),
    "deleted": (
        lambda cluster, pod, job: cluster.do("delete", "pods", pod),
        r"pod jd-\S+ on node n\d was deleted",
    ),
    "suspended by Kueue": (
        lambda cluster, pod, job: cluster.do("suspend", job),
        r"job jd-\S+ was suspended \(Preempted to accommodate a workload due to prioritization in the ClusterQueue\)",
    ),
    "the job deleted": (
        lambda cluster, pod, job: cluster.do("delete", "jobs", job),
        r"job jd-\S+ was deleted",
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", LOSSES)
def test_a_lost_pod_is_reported_with_the_reason(cluster: Cluster, client: Open, how: str) -> None:
    act, said = LOSSES[how]
    one = client()
    group = one.group(2)
    [job], [pod] = cluster.names("jobs"), cluster.names("pods")
    thread = one.when(m.Started, lambda _: act(cluster, pod, job))
    one.run(group, FOR_EVER)
    thread.join(60)
    reason = one.wait(m.WorkerGroupClosed).reason
    assert re.fullmatch(rf"node \S+ was lost: {said}.*", reason), reason
    assert "--version" not in reason, "how to try a command in a pod that has ended"
    assert wait_until(lambda: job not in cluster.names("jobs"), 20), "what is left of it is given back"


def test_a_connection_that_is_cut_is_taken_up_again(cluster: Cluster, client: Open) -> None:
    """As when the API server is restarted. The pod's files are its own, so the cell ends by the clock."""
    one = client()
    group = one.group(2)
    [pod] = cluster.names("pods")
    source = dedent("""\
        import time
        print('in', flush=True)
        until = time.monotonic() + 5
    """)
    run = one.start(group, f"{source}while time.monotonic() < until:\n    time.sleep(0.01)\nrank")
    while not isinstance(one.seen.get(timeout=60), m.Wrote):
        pass
    cluster.do("cut", pod)
    assert one.finish(run, (0, 1)).values == {0: 0, 1: 1}
    assert cluster.names("pods") == [pod]


def test_after_a_loss_the_next_cell_has_new_pods(cluster: Cluster, client: Open) -> None:
    one = client(nodes="2")
    one.group(2)
    cluster.do("evict", cluster.names("pods")[1])
    assert "was evicted" in one.wait(m.WorkerGroupClosed).reason
    again = one.group(2)
    assert one.run(again, "rank").values == {0: 0, 1: 1}


def test_a_time_limit_ends_the_pods_and_is_named(cluster: Cluster, client: Open) -> None:
    one = client(time="12s")
    one.group(1)
    assert "has reached its time limit" in (reason := one.wait(m.WorkerGroupClosed).reason), reason


def test_the_status_tells_the_nodes_and_what_the_role_allows(cluster: Cluster, client: Open) -> None:
    told = status(client())
    assert [(node.name, node.cpus, node.gpus) for node in told.nodes or ()] == [("n0", 16.0, 4), ("n1", 16.0, 4)]
    assert told.next_rank == "with a new Job, when its pods have nodes"


def test_the_status_names_the_rights_that_are_missing(cluster: Cluster, client: Open) -> None:
    for verb, resource in (("list", "nodes"), ("create", "pods/exec"), ("watch", "pods")):
        cluster.do("deny", verb, *resource.split("/"))
    told = status(client(namespace="team", idle="99"))
    assert told.nodes is None
    assert told.next_rank == "is refused: your role does not allow watch pods, create pods/exec in namespace team"


def status(one: PoolClient) -> m.ServerStatus:
    def ask() -> m.ServerStatus:
        one.send(m.Ask(question=7))
        return one.wait(m.Answered).status

    assert wait_until(lambda: ask().next_rank, 20)
    return ask()
