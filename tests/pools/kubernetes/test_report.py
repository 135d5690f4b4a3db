"""What is told of a cluster's nodes, from the objects of its API."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jupyter_distrib.coordinator.node_report import NodeReport
from jupyter_distrib.pools.kubernetes.kubectl import Kubectl
from jupyter_distrib.pools.kubernetes.report import nodes, query_nodes, with_free_gpus


def node(name: str, gpus: int) -> dict[str, Any]:
    has = {"cpu": "16", "memory": "64Gi", "nvidia.com/gpu": str(gpus)}
    ready = [{"type": "Ready", "status": "True"}]
    return {"metadata": {"name": name}, "status": {"allocatable": has, "conditions": ready}}


def pod(where: str, *gpus: int, phase: str = "Running", first: int = 0, staying: int = 0) -> dict[str, Any]:
    def container(count: int, **more: str) -> dict[str, Any]:
        return {"resources": {"limits": {"nvidia.com/gpu": str(count), "cpu": "1"}}, **more}

    spec: dict[str, Any] = {"containers": [container(count) for count in gpus]}
    spec["initContainers"] = [container(first), container(staying, restartPolicy="Always")]
    return {"spec": spec | ({"nodeName": where} if where else {}), "status": {"phase": phase}}


def free(*pods: dict[str, Any]) -> list[int | None]:
    found = with_free_gpus(nodes([node("a", 4), node("b", 4)]), pods)
    return [each.free_gpus for each in found]


def test_gpus_that_pods_have_requested_are_not_free() -> None:
    assert free() == [4, 4]
    assert free(pod("a", 1, 2), pod("a", 1, phase="Pending"), pod("b", 1)) == [0, 3]
    assert free(pod("a", 2, phase="Succeeded"), pod("a", 2, phase="Failed"), pod("", 4)) == [4, 4]
    assert free(pod("a", 1, first=3), pod("b", 1, first=1, staying=1)) == [1, 2]


def reported(folder: Path, pods: str) -> NodeReport:
    """The report of a cluster whose list of pods is the output of this shell command."""
    (folder / "nodes.json").write_text(json.dumps({"items": [node("a", 4)]}))
    (folder / "pods.json").write_text(json.dumps({"items": [pod("a", 1)]}))
    program = folder / "kubectl"
    program.write_text(
        f"""#!/bin/sh
case " $* " in
*" get nodes "*) cat {folder}/nodes.json ;;
*" get pods "*) {pods} ;;
*" auth can-i "*) echo yes ;;
esac
"""
    )
    program.chmod(0o755)
    return query_nodes(Kubectl({"kubectl": str(program)}), lambda report: None)


def test_free_gpus_are_told_only_if_all_pods_may_be_listed(tmp_path: Path) -> None:
    (seen,) = reported(tmp_path, f"cat {tmp_path}/pods.json").nodes or ()
    assert (seen.gpus, seen.free_gpus) == (4, 3)
    forbidden = 'echo "Error from server (Forbidden): pods is forbidden" >&2; exit 1'
    (seen,) = reported(tmp_path, forbidden).nodes or ()
    assert (seen.gpus, seen.free_gpus) == (4, None)
