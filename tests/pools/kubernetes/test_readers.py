"""Options of the pool that are wrong: each in one sentence."""

from __future__ import annotations

import pytest

from jupyter_distrib.errors import OptionsError
from jupyter_distrib.options import duration_s, parse_arguments
from jupyter_distrib.pools.kubernetes.pool import KubernetesPool

WRONG = {
    "image": ("'a b'", "'-flag=x'", "'$(id)'", "a;b"),
    "namespace": ("Team", "a_b", "-a", "a/b", "x" * 254, "ä"),
    "queue": ("Team", "'a b'", "a."),
    "service-account": ("Me", "a:b"),
    "context": ("' a'", "'a\nb'"),
    "gpus-per-pod": ("0", "-1", "many", "1.5", "9" * 12),
    "gpu-resource": ("gpu", "nvidia.com/", "/gpu", "'nvidia.com/g pu'"),
    "cpu": ("0", "-1", "4Gi", "four", "1e3", "0m"),
    "memory": ("0", "64", "64GB", "64 Gi", "500m", "-1Gi", "lots"),
    "shm": ("0Gi", "64gb", "half"),
    "time": ("30", "0m", "2:00:00", "1w", "-5m", "m", "9999999h", "'1h 30m'"),
    "kubectl": ('"\'"', "' '"),
    "nodes": ("0", "two"),
}
RIGHT = {
    "image": ("torch", "registry.example:5000/a/b:1.2", "a/b@sha256:0123"),
    "namespace": ("team", "a-1"),
    "queue": ("team-queue", "a.b"),
    "service-account": ("default",),
    "context": ("arn:aws:eks:eu-west-1:1234:cluster/gpu", "'a b'"),
    "gpus-per-pod": ("8",),
    "gpu-resource": ("nvidia.com/gpu", "nvidia.com/mig-1g.10gb", "amd.com/gpu"),
    "cpu": ("4", "0.5", "500m"),
    "memory": ("64Gi", "500M", "1.5Ti", "68719476736"),
    "shm": ("1Gi",),
    "time": ("90m", "2h", "1d12h", "45s", "1h30m"),
    "kubectl": ("'microk8s kubectl'", "/opt/bin/kubectl"),
    "nodes": ("2",),
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name in WRONG for text in WRONG[name]])
def test_a_wrong_value_is_refused_in_one_sentence(name: str, text: str) -> None:
    with pytest.raises(OptionsError) as error:
        parse_arguments(f"--{name} {text}", KubernetesPool.options)
    said = str(error.value)
    assert said.startswith(f"--{name} ")
    assert "\n" not in said


@pytest.mark.parametrize(("name", "text"), [(name, text) for name in RIGHT for text in RIGHT[name]])
def test_a_right_value_is_taken(name: str, text: str) -> None:
    assert parse_arguments(f"--{name} {text}", KubernetesPool.options).values


def test_durations_are_seconds() -> None:
    assert [duration_s(text) for text in ("45s", "90m", "1d12h", "1h30m", "x", "")] == [45, 5400, 129_600, 5400, 0, 0]
