"""What of this machine is offered as a pool: read from files and variables, without a connection or a program."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest

from jupyter_distrib.pools import discovery
from jupyter_distrib.pools.kubernetes.discovery import contexts
from jupyter_distrib.pools.ray import discovery as ray
from jupyter_distrib.pools.ssh import discovery as ssh


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine on which there is nothing; whatever connects or starts a program fails."""
    (tmp_path / ".ssh").mkdir()
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(ray, "_FILE", f"ray-{os.getpid()}/address")
    for name in ("RAY_ADDRESS", "SLURM_JOB_ID", "KUBECONFIG"):
        monkeypatch.delenv(name, raising=False)

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("this is not to be done")

    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.setattr(socket, "create_connection", refused)
    monkeypatch.setattr(subprocess.Popen, "__init__", refused)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))


def put_program(home: Path, name: str) -> None:
    (home / "bin" / name).write_text("#!/bin/sh\nexit 1\n")
    (home / "bin" / name).chmod(0o755)


def hosts() -> list[str]:
    return [each.options["hosts"] for each in ssh.found()]


def test_nothing_is_found_where_nothing_is(home: Path) -> None:
    assert discovery.found() == []


def test_hosts_of_the_configuration_of_ssh_are_found_with_those_of_included_files(home: Path) -> None:
    write(
        home / ".ssh" / "config",
        """
        # Host commented
        Include conf.d/*.conf "other file" ~/far/config nowhere
        Host gpu1 gpu2  # both
            User me
        host=gpu3
        Host * !gpu1 lab-?
        Host "gpu4"
        Match host secret
            User git
        Host github.com
            User git
        Host gpu1
        Host -oProxyCommand=evil %h a,b
        """,
    )
    write(home / ".ssh" / "conf.d" / "b.conf", "Host b\nInclude ../conf.d/a.conf\n")
    write(home / ".ssh" / "conf.d" / "a.conf", "Host a\nInclude b.conf conf.d/a.conf\n")
    write(home / ".ssh" / "other file", "Host spaced\n")
    write(home / "far" / "config", "Host far\n")

    assert hosts() == ["a", "b", "spaced", "far", "gpu1", "gpu2", "gpu3", "gpu4"]
    first = ssh.found()[0]
    assert (first.kind, first.name, first.text) == ("ssh", "a", "ssh: a (~/.ssh/conf.d/a.conf)")


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives a file to another user")
@pytest.mark.parametrize("writable", [False, True])
def test_a_file_that_another_user_may_have_written_offers_no_hosts(home: Path, *, writable: bool) -> None:
    write(home / ".ssh" / "config", "Host mine\nInclude theirs\n")
    theirs = home / ".ssh" / "theirs"
    write(theirs, "Host planted\n")
    assert hosts() == ["mine", "planted"]

    if writable:
        theirs.chmod(0o666)
    else:
        os.chown(theirs, 4242, 4242)
    assert hosts() == ["mine"]


def test_a_configuration_of_any_kind_is_read_at_once(home: Path) -> None:
    path = home / ".ssh" / "config"
    for content in (b"\xff\xfe", b'Host "open\n', b"Include config\nHost a\n", b"Host\nHost =\nInclude\n", b"\0" * 100):
        path.write_bytes(content)
        assert hosts() in ([], ["a"])
    path.write_text("".join(f"Host h{number}\n" for number in range(2000)))
    assert len(hosts()) == ssh.MOST_HOSTS
    path.unlink()
    os.mkfifo(path)
    assert hosts() == []


def test_a_slurm_in_path_is_found(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_program(home, "srun")

    assert [(each.kind, each.text) for each in discovery.found()] == [("slurm", f"Slurm: {home}/bin/srun")]
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert discovery.found()[0].text == "Slurm: job 7, in which the notebook runs"


def test_addresses_of_ray_are_found(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(home / ray._FILE, "10.0.0.5:6379\n")
    assert [each.options["address"] for each in ray.found()] == ["10.0.0.5:6379"]

    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    told = [each.text for each in ray.found()]
    assert told == ["Ray: ray://head:10001 (RAY_ADDRESS)", f"Ray: 10.0.0.5:6379 ({home}/{ray._FILE})"]
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.5:6379")
    assert len(ray.found()) == 1
    for wrong in ("auto", "", "nonsense", "a:b:c"):
        monkeypatch.setenv("RAY_ADDRESS", wrong)
        assert [each.options["address"] for each in ray.found()] == ["10.0.0.5:6379"]


@pytest.mark.parametrize("address", ["ray://u:hunter2@head:10001", "u:hunter2@head:6379", "ray://hunter2@head:10001"])
def test_what_is_found_is_reported_without_passwords(home: Path, monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)

    (found,) = ray.found()
    assert "head:" in found.text
    assert "hunter2" not in f"{found}"


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives a file to another user")
def test_an_address_that_another_user_has_put_there_is_not_believed(home: Path) -> None:
    write(home / ray._FILE, "10.0.0.5:6379\n")
    os.chown(home / ray._FILE, 4242, 4242)

    assert ray.found() == []


CONFIG = """
apiVersion: v1
clusters:
- cluster: {server: https://x}
  name: not-this
contexts:  # two
- context:
    cluster: not-this
    namespace: team
    user: somebody
  name: "prod: one"
- name: dev  # mine
  context:
    cluster: not-this
    extensions:
    - name: nor-this
current-context: dev
kind: Config
users:
- name: nor-that
"""


def test_contexts_of_a_kubeconfig_are_found(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(home / ".kube" / "config", CONFIG)
    assert discovery.found() == []  # without kubectl they are of no use

    put_program(home, "kubectl")
    found = discovery.found()
    assert [each.options for each in found] == [{"context": "prod: one", "namespace": "team"}, {"context": "dev"}]
    assert [each.name for each in found] == ["prod-one", "dev"]
    second = {"contexts": [{"name": "json", "context": {"namespace": "n"}}, {"name": "dev"}, 7]}
    write(home / "second", json.dumps(second))
    monkeypatch.setenv("KUBECONFIG", f"{home}/second::{home}/.kube/config:{home}/nowhere")
    assert [each.options["context"] for each in discovery.found()] == ["json", "dev", "prod: one"]


@pytest.mark.parametrize(
    "text", ["", "contexts:", "contexts: []", "{", "contexts:\n- name:\n", "{}", "[1]", "\0\n- name: a"]
)
def test_a_kubeconfig_without_contexts_has_none(text: str) -> None:
    assert contexts(text) == []


def test_contexts_may_be_indented() -> None:
    assert contexts("contexts:\n  - name: a\n    context:\n      namespace: b\n  - name: c\n") == [
        ("a", "b"),
        ("c", ""),
    ]


@pytest.mark.parametrize(
    ("text", "name"),
    [("gpu1", "gpu1"), ("10.0.0.1", "ssh-10.0.0.1"), ("me@host", "me-host"), ("ray", "ssh-ray"), ("", "ssh")],
)
def test_names_that_are_proposed_can_name_a_pool(text: str, name: str) -> None:
    assert discovery.pool_name(text, "ssh") == name
