"""The object that is created: what the options put into it, and what of a template is changed."""

from __future__ import annotations

import re
from typing import Any

import pytest

from jupyter_distrib.pools.kubernetes import keeper, manifest, template

OPTIONS = {"image": "torch:1", "python": "python3"}


def made(size: int = 2, *, gpus: bool = False, owner: dict[str, Any] | None = None, **options: str) -> dict[str, Any]:
    given = {**OPTIONS, **options}
    shape = manifest.shape(given, size, gpus=gpus)
    return manifest.made(given, template.none(), "jd-x-1", shape, owner)


def pod(job: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = job["spec"]["template"]["spec"]
    return found


@pytest.mark.parametrize(
    ("size", "gpus", "options", "pods", "ranks"),
    [
        (4, False, {}, 1, 4),
        (4, False, {"nodes": "2"}, 2, 2),
        (5, False, {"nodes": "2"}, 2, 3),
        (1, False, {"nodes": "2"}, 1, 1),
        (16, True, {"gpus_per_pod": "8"}, 2, 8),
        (9, True, {"gpus_per_pod": "8"}, 2, 8),
        (4, True, {"gpus_per_pod": "8"}, 1, 8),
        (8, True, {"gpus_per_pod": "8", "nodes": "2"}, 2, 4),
        (8, True, {}, 1, 8),
        (8, False, {"gpus_per_pod": "4"}, 1, 8),
    ],
)
def test_ranks_are_in_as_few_pods_as_can_be_or_in_as_many_as_are_asked_for(
    size: int, gpus: bool, options: dict[str, str], pods: int, ranks: int
) -> None:
    shape = manifest.shape(options, size, gpus=gpus)
    assert (shape.pods, shape.ranks) == (pods, ranks)


def test_a_gpu_is_asked_for_only_by_ranks_with_gpus_and_by_its_own_name() -> None:
    assert "gpu" not in repr(made())
    [container] = pod(made(8, gpus=True, gpus_per_pod="4", gpu_resource="amd.com/gpu"))["containers"]
    assert container["resources"] == {"limits": {"amd.com/gpu": "4"}, "requests": {"amd.com/gpu": "4"}}


def test_shared_memory_is_always_there_and_limited_only_on_request() -> None:
    for options, volume in (({}, {"medium": "Memory"}), ({"shm": "1Gi"}, {"medium": "Memory", "sizeLimit": "1Gi"})):
        found = pod(made(**options))
        assert [each["emptyDir"] for each in found["volumes"]] == [volume]
        assert found["containers"][0]["volumeMounts"] == [
            {"name": found["volumes"][0]["name"], "mountPath": "/dev/shm"}
        ]


def test_the_mount_of_a_template_at_shared_memory_is_left_alone() -> None:
    given = template.none()
    given.container["volumeMounts"] = [{"name": "own", "mountPath": "/dev/shm/"}]
    found = manifest.made(OPTIONS, given, "jd-x-1", manifest.shape({}, 1, gpus=False))
    assert "volumes" not in pod(found)
    assert given.container["volumeMounts"] == pod(found)["containers"][0]["volumeMounts"]


def test_no_pod_starts_again_and_the_job_goes_by_itself() -> None:
    spec = made(nodes="2")["spec"]
    assert (spec["backoffLimit"], spec["ttlSecondsAfterFinished"], spec["completionMode"]) == (0, 60, "Indexed")
    assert (spec["completions"], spec["parallelism"]) == (2, 2)
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    assert spec["template"]["spec"]["containers"][0]["command"] == keeper.keeper("python3")


def test_options_become_fields() -> None:
    owner = {"apiVersion": "v1", "kind": "Pod", "name": "jupyter-ada", "uid": "1"}
    found = made(queue="q", time="2h", service_account="me", cpu="4", memory="8Gi", owner=owner)
    assert found["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "q"
    assert found["metadata"]["ownerReferences"] == [owner]
    assert (found["spec"]["suspend"], found["spec"]["activeDeadlineSeconds"]) == (True, 7200)
    assert pod(found)["serviceAccountName"] == "me"
    assert pod(found)["containers"][0]["resources"]["limits"] == {"cpu": "4", "memory": "8Gi"}


@pytest.mark.parametrize(
    "title", ["train.ipynb", "", "Über die Maßen, 2.ipynb", "..", "-" * 80, "a" * 300, "x; rm -rf /"]
)
def test_names_are_names_for_the_cluster(title: str) -> None:
    name = manifest.object_name(title, "0123abcd")
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name), name
    assert len(name) <= 45, "the names of pods are longer"


def test_what_another_job_had_of_its_own_is_not_taken_over() -> None:
    labels = {"team": "vision", "batch.kubernetes.io/controller-uid": "7", "controller-uid": "7", "job-name": "old"}
    spec: dict[str, Any] = {"containers": [{"name": "a", "image": "b"}]}
    old = {
        "kind": "Job",
        "metadata": {"name": "old", "uid": "7", "labels": dict(labels), "ownerReferences": [{"uid": "8"}]},
        "spec": {"selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels}, "spec": spec}},
        "status": {"active": 1},
    }
    taken = template.taken([old], "old.yaml")
    job = manifest.made(OPTIONS, taken, "jd-x-1", manifest.shape({}, 1, gpus=False))
    ours = {"team": "vision", "app.kubernetes.io/managed-by": "jupyter-distrib", "jupyter-distrib/request": "jd-x-1"}
    assert job["metadata"] == {"name": "jd-x-1", "labels": ours}
    assert job["spec"]["template"]["metadata"]["labels"] == ours
    assert "selector" not in job["spec"]
    assert "status" not in job
