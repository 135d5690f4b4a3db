"""Which cluster `auto` means, and which clusters are refused, without Ray."""

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
    command_lines = cluster._command_lines
    before = [*command_lines((os.getuid(), 0, 12345))]  # of clusters that run on this machine
    monkeypatch.setattr(cluster, "_command_lines", lambda users: [x for x in command_lines(users) if x not in before])
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


@pytest.mark.parametrize(
    ("wanted", "own", "insecure", "said"),
    [
        ("", "", False, "asks for no token, so anyone who reaches it can run code on it"),
        ("", "mine", False, "asks for no token, so anyone who reaches it can run code on it"),
        ("", "", True, cluster._DISABLED),
        ("right", "", True, "asks for a token: put it into"),
        ("right", "wrong", True, "rejects this token"),
        ("right", "right", False, "token"),
    ],
)
def test_a_cluster_without_a_token_is_refused_unless_the_user_allows_it(
    wanted: str, own: str, insecure: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none that asks for no token is sent one."""
    monkeypatch.setenv("RAY_AUTH_TOKEN", own)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/nowhere")
    sent = []

    def refuses(_: cluster.Address, token: str) -> bool:
        sent.append(token)
        return token != wanted

    monkeypatch.setattr(cluster, "check_port", lambda _: None)
    monkeypatch.setattr(cluster, "_refuses", refuses)
    try:
        found = cluster.find_cluster("127.0.0.1:6379", insecure=insecure)[1]
    except PoolError as error:
        found = str(error)
    assert said in found
    assert sent == (["", own] if wanted and own else [""])
