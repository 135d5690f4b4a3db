"""Which cluster `auto` means, without Ray."""

from __future__ import annotations

import os
import subprocess

import pytest

from jupyter_distrib.errors import PoolError
from jupyter_distrib.pools.ray import cluster

RAYLET = ("raylet", "-c", "echo; read line", "sh")
"""A program that calls itself a raylet, and waits for the end of its input."""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
@pytest.mark.parametrize(("uid", "believed"), [(0, True), (12345, False)])
def test_a_cluster_of_another_user_is_not_joined_unasked(
    uid: int, believed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be sent this user's token."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    users = (os.getuid(), 0)
    if any(map(cluster._cluster_of, cluster._command_lines(users))):
        pytest.skip("a Ray cluster runs on this machine")
    with subprocess.Popen(
        (*RAYLET, "--gcs-address=203.0.113.7:6379"),
        executable="/bin/sh",
        user=uid,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        if believed:
            assert cluster.resolve("auto").host == "203.0.113.7"
        else:
            with pytest.raises(PoolError, match="no Ray cluster of yours runs on this machine"):
                cluster.resolve("auto")
        process.communicate()
