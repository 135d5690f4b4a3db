"""Hosts that cannot be used, by a real ssh: one sentence each, soon, with a command to try."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from jupyter_distrib.pools.ssh.pool import SshPool
from jupyter_distrib.testing import PoolClient
from jupyter_distrib.wire import messages as m
from tests.notebook import Notebook
from tests.ssh.bed import PORT, Bed, Host
from tests.ssh.conftest import name_it

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def refusal(bed: Bed, **options: str) -> str:
    client = PoolClient(SshPool(**{**bed.options, **options}))
    try:
        refused = client.open(2)
        assert isinstance(refused, m.WorkerGroupRefused), refused
        assert "\n" not in refused.reason
        return refused.reason
    finally:
        client.close()


@contextmanager
def config(bed: Bed, name: str, *lines: str) -> Iterator[str]:
    """The ssh command with other lines before those of the bed, which win."""
    path = bed.folder / name
    path.write_text("\n".join(["Host *", *(f"  {line}" for line in lines), ""]) + bed.config.read_text())
    yield f"ssh -F {path}"


def test_no_such_host(bed: Bed) -> None:
    said = refusal(bed, hosts="no-such-host.invalid")
    assert said.startswith("there is no host no-such-host.invalid (ssh: Could not resolve hostname"), said
    assert f"try `ssh -F {bed.config} no-such-host.invalid true`" in said


def test_nobody_listens(bed: Bed) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.9", PORT))
        with config(bed, "silent", "HostName 127.0.0.9") as ssh:
            assert refusal(bed, hosts="host1", ssh=ssh).startswith(
                "no SSH server answers on host1 (ssh: connect to host"
            )


def test_a_host_that_answers_but_not_as_a_server(bed: Bed) -> None:
    with (
        socket.create_server(("127.0.0.9", PORT)),
        config(bed, "mute", "HostName 127.0.0.9", "ConnectTimeout 1") as ssh,
    ):
        said = refusal(bed, hosts="host1", ssh=f"{ssh} -oConnectTimeout=1")
    assert said.startswith("host host1 does not answer ("), said


def test_the_host_key_has_changed(bed: Bed) -> None:
    other = (bed.folder / "user.pub").read_text().split()[:2]
    known = bed.folder / "changed"
    known.write_text(f"[127.0.0.2]:{PORT} {' '.join(other)}\n")
    with config(bed, "changed.conf", f"UserKnownHostsFile {known}") as ssh:
        said = refusal(bed, hosts="host1", ssh=ssh)
    assert said.startswith("the host key of host1 has changed"), said
    assert f"`ssh-keygen -R [127.0.0.2]:{PORT}`" in said


def test_the_host_key_is_not_known(bed: Bed) -> None:
    with config(bed, "unknown", "UserKnownHostsFile /dev/null") as ssh:
        assert refusal(bed, hosts="host1", ssh=ssh).startswith("the host key of host1 is not known here: run `ssh -F ")


def test_a_password_would_be_needed(bed: Bed) -> None:
    with config(bed, "password", "IdentityFile /dev/null", "IdentityAgent none") as ssh:
        text = Path(ssh.split()[-1]).read_text().replace(f"IdentityFile {bed.folder}/user\n", "IdentityFile none\n")
        Path(ssh.split()[-1]).write_text(text)
        said = refusal(bed, hosts="host1", ssh=ssh)
    assert said.startswith("host1 accepts none of your keys, and a pool cannot type passwords ("), said
    assert "`ssh-copy-id host1`" in said


def test_no_python_there(bed: Bed) -> None:
    said = refusal(bed, hosts="host1", python="~/no/python")
    assert said.startswith(
        "there is no Python at ~/no/python on host host1: set python to an interpreter with torch there;"
    ), said


def other_python() -> str:
    """A Python of another version than this one, on the path or beside it; or nothing."""
    for minor in (11, 12, 13, 14):
        name = f"python3.{minor}"
        beside = Path(sys.base_prefix).parent.glob(f"*/bin/{name}")
        for path in (*beside, shutil.which(name)):
            works = path and subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0
            if works and minor != sys.version_info[1]:
                return str(path)
    return ""


def test_another_python_there(bed: Bed, tmp_path: Path) -> None:
    """It gets the sources, since it passes over what this one has compiled."""
    other = other_python() or pytest.skip("no other Python here")
    name_it(bed, tmp_path, python=other, nodes=1, ranks=2)
    with Notebook(tmp_path) as book:
        book.ok("%load_ext jupyter_distrib")
        said = book.fails("%%distributed\nrank").traceback
    assert re.search(
        r"node host1: the notebook has Python [\d.]+ and the SSH pool has Python [\d.]+, which cannot exchange values",
        said,
    ), said


def test_no_such_configuration_of_ssh(bed: Bed) -> None:
    said = refusal(bed, ssh="ssh -F /no/file")
    assert said.startswith("ssh did not reach host host1 (Can't open user config file /no/file: No such file"), said
    assert said.endswith(": try `ssh -F /no/file host1 true`. Nor can 1 other host be used."), said


def test_a_line_of_its_configuration_that_ssh_does_not_know(bed: Bed) -> None:
    with config(bed, "misspelt", "ProxyJumb other") as ssh:
        said = refusal(bed, hosts="host1", ssh=ssh)
    assert said.startswith("ssh cannot read its configuration ("), said
    assert "/misspelt: line 2: Bad configuration option: proxyjumb): correct it; try `ssh -F " in said, said


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("ProxyJump no-such-host.invalid", "ssh: Could not resolve hostname no-such-host.invalid: "),
        ("ProxyJump 127.0.0.99", "ssh: connect to host 127.0.0.99 port 2022: Connection refused"),
        (
            "ProxyJump stranger",
            "No ED25519 host key is known for [127.0.0.3]:2022 and you have requested strict checking",
        ),
        ("ProxyJump nobody@host2", "nobody@127.0.0.3: Permission denied ("),
        ("HostName nowhere.invalid\n  ProxyJump host2", "channel 0: open failed: connect failed: "),
        ("ProxyCommand /no/such/program %h", "/no/such/program: "),
    ],
)
def test_a_host_on_the_way_that_cannot_be_used_is_not_taken_for_the_host(bed: Bed, line: str, why: str) -> None:
    path = bed.folder / "through"
    stranger = "Host stranger\n  HostName 127.0.0.3\n  UserKnownHostsFile /dev/null\n"
    path.write_text(f"{stranger}Host there\n  HostName 127.0.0.2\n  {line}\n{bed.config.read_text()}")
    if "HostName" in line:
        path.write_text(path.read_text().replace("HostName 127.0.0.2\n  HostName", "HostName", 1))
    began_s = time.monotonic()
    said = refusal(bed, hosts="there", ssh=f"ssh -F {path}")
    assert said.startswith(
        "there is reached through another host or command (ProxyJump, ProxyCommand), and that fails"
    ), said
    assert why in said, said
    assert time.monotonic() - began_s < 9, "nothing is tried again that cannot succeed"


def test_what_a_banner_says_is_no_message_of_ssh(bed: Bed) -> None:
    banner = bed.folder / "banner"
    banner.write_text("Others: Permission denied. Host key verification failed users are logged.\n")
    strict = Host(bed.folder, 9, extra=[f"Banner {banner}", "MaxSessions 0"])
    bed.hosts.append(strict)
    bed.write_config()
    try:
        assert refusal(bed, hosts="host9").startswith("ssh did not reach host host9 (channel 0: open failed")
    finally:
        bed.hosts.remove(strict)
        bed.write_config()
        strict.close()


def test_a_disk_that_is_full(bed: Bed) -> None:
    full = Host(bed.folder, 7, size="300k")
    bed.hosts.append(full)
    bed.write_config()
    try:
        said = refusal(bed, hosts="host7")
        assert said.startswith("there is no space left on host host7 for a worker group"), said
        assert full.folders() == []
    finally:
        bed.hosts.remove(full)
        bed.write_config()
        full.close()


def test_hosts_behind_a_server_that_turns_many_away_are_all_reached(bed: Bed) -> None:
    jump = Host(bed.folder, 8, extra=["MaxStartups 1"])
    bed.hosts.append(jump)
    bed.write_config()
    bed.hosts.remove(jump)
    names = [f"behind{number}" for number in range(1, 5)]
    try:
        behind = [f"Host {name}\n  HostName {bed.hosts[0].address}\n  ProxyJump {jump.name}\n" for name in names]
        path = bed.folder / "behind"
        path.write_text("".join(behind) + bed.config.read_text())
        client = PoolClient(SshPool(**{**bed.options, "hosts": ":1,".join([*names, ""])[:-1], "ssh": f"ssh -F {path}"}))
        assert client.run(client.group(4), "rank").values == {0: 0, 1: 1, 2: 2, 3: 3}
        client.close()
        assert "past MaxStartups" in (bed.folder / f"{jump.name}.log").read_text()
    finally:
        bed.write_config()
        jump.close()


def test_more_ranks_than_slots(bed: Bed) -> None:
    said = refusal(bed, hosts="host1:1")
    assert said == ("2 ranks are asked for, but the hosts have room for 1 (host1: 1): ask for at most 1, or add hosts.")


def test_a_host_that_cannot_be_used_is_left_out_and_said(bed: Bed, tmp_path: Path) -> None:
    name_it(bed, tmp_path, hosts="host1,no-such-host.invalid", nodes=1, ranks=2)
    with Notebook(tmp_path) as book:
        book.ok("%load_ext jupyter_distrib")
        outcome = book.ok("%%distributed\nrank")
        assert outcome.result == "rank 0: 0\nrank 1: 1", outcome.result
        assert "there is no host no-such-host.invalid" in outcome.view


def test_ranks_for_two_nodes_are_not_put_on_the_one_that_is_left(bed: Bed) -> None:
    said = refusal(bed, hosts="host1,no-such-host.invalid", nodes="2")
    assert said.startswith("2 ranks on 2 hosts are asked for, and only host1 can be used: leave nodes out"), said
    assert "there is no host" in said


def test_another_torch_there(bed: Bed, tmp_path: Path) -> None:
    about = bed.folder / "other" / "torch-99.0.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 99.0.0\n")
    python = bed.folder / "other" / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={about.parent} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    name_it(bed, tmp_path, python=str(python), nodes=1, ranks=2)
    with Notebook(tmp_path) as book:
        book.ok("%load_ext jupyter_distrib")
        said = book.fails("%%distributed\nrank").traceback
    assert "node host1: the notebook has torch 2." in said, said
    assert "the SSH pool has torch 99.0.0, which cannot exchange values" in said, said


def test_what_start_up_files_print_is_passed_over(bed: Bed, tmp_path: Path) -> None:
    """root's ~/.bashrc runs there: it is this machine's, so a wrapper prints in its place."""
    python = bed.folder / "chatty"
    python.write_text(f'#!/bin/sh\nprintf "Welcome\\nto \\0 $(hostname)"\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    client = PoolClient(SshPool(**{**bed.options, "python": str(python), "nodes": "2"}))
    group = client.group(2)
    assert client.run(group, "import socket\nsocket.gethostname()").values == {0: "host1", 1: "host2"}
    client.close()
