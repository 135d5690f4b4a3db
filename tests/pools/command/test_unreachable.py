"""Hosts whose commands work, and that do not reach one another: in network namespaces, where packets get lost."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_distrib.interfaces import framework
from jupyter_distrib.pools.command.pool import CommandPool
from jupyter_distrib.testing import PoolClient
from jupyter_distrib.wire.messages import Failed
from jupyter_distrib.worker import tensorflow
from tests.notebook import Notebook
from tests.ray.conftest import write_trusted

pytestmark = pytest.mark.slow

NODE1, NODE2 = "10.77.0.11", "10.77.0.12"
LOST = f"ip neigh replace {NODE1} lladdr 02:00:00:00:00:99 dev eth0 nud permanent"
"""Packets to the first node go to nobody, as behind a firewall that drops them."""
REFUSED = f"ip route add unreachable {NODE1}/32"


class Net:
    """Two namespaces with a cable between them, and a command that runs words in one of them."""

    def __init__(self, folder: Path) -> None:
        sleep = ["unshare", "--net", "--uts", "sh", "-c", 'hostname "$0"; echo up; exec sleep 1000']
        self._holders = [
            subprocess.Popen([*sleep, name], stdout=subprocess.PIPE, stderr=subprocess.PIPE) for name in ("n1", "n2")
        ]
        for holder in self._holders:
            if (holder.stdout and holder.stdout.readline()) != b"up\n":
                self.close()
                pytest.skip("no network namespaces can be made here")
        first, second = (holder.pid for holder in self._holders)
        self.within(0, f"ip link add eth0 type veth peer name eth0 netns {second}")
        for number, address in enumerate((NODE1, NODE2)):
            self.within(number, f"ip addr add {address}/24 dev eth0; ip link set eth0 up; ip link set lo up")
        self.script = folder / "reach.sh"
        self.script.write_text(
            f'case "$1" in n1) pid={first} at={NODE1};; n2) pid={second} at={NODE2};; esac; shift\n'
            'exec nsenter --net=/proc/$pid/ns/net --uts=/proc/$pid/ns/uts env SSH_CONNECTION="$at 1 $at 22" "$@"\n'
        )

    def within(self, number: int, script: str) -> None:
        pid = self._holders[number].pid
        subprocess.run(["nsenter", f"--net=/proc/{pid}/ns/net", "sh", "-ec", script], check=True)

    @property
    def options(self) -> dict[str, str]:
        return {"hosts": "n1,n2", "start": f"sh {self.script} {{host}} {{python}}", "python": sys.executable}

    def close(self) -> None:
        for holder in self._holders:
            holder.kill()
            holder.communicate()


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Net]:
    one = Net(tmp_path)
    yield one
    one.close()


MEETS = """\
import torch, torch.distributed as dist
t = torch.ones(1)
dist.all_reduce(t)
t.item()"""


@pytest.mark.parametrize("cut", [LOST, REFUSED])
def test_the_first_group_says_which_node_does_not_reach_which(net: Net, cut: str) -> None:
    client = PoolClient(CommandPool(**net.options, nodes="2"))
    try:
        group = client.group(2)
        net.within(1, cut)
        began_s = time.monotonic()
        outcome = client.run(group, MEETS, strategy="ddp")
        assert time.monotonic() - began_s < 8
        [failed] = outcome.of(Failed)
        assert failed.rank == 1
        text = failed.failure.message
        assert f"node n2 does not reach the node of rank 0 at {NODE1}" in text, text
        assert "open the ports between the nodes, or name another network with --interface" in text, text
        assert [outcome.text(rank, "stderr") for rank in range(2)] == ["", ""], "nothing of torch's own"
        assert client.run(group, "rank").values == {0: 0, 1: 1}, "what needs no group goes on"
    finally:
        client.close()


ON_RAY = "from jupyter_distrib.compat import on_ray\non_ray.member(int, (), {}, 'token')"


@pytest.mark.parametrize(
    ("source", "strategy"), [("rank", "tensorflow"), (ON_RAY, "none")], ids=["tensorflow", "ray_launch"]
)
def test_what_is_not_torchs_says_it_as_well(net: Net, source: str, strategy: str) -> None:
    client = PoolClient(CommandPool(**net.options, nodes="2"))
    try:
        variables = {framework.VARIABLE: tensorflow.NAME} if strategy == "tensorflow" else {}
        group = client.group(2, load_env=variables)
        net.within(1, LOST)
        began_s = time.monotonic()
        outcome = client.run(group, source, strategy=strategy)
        assert time.monotonic() - began_s < 8
        text = next(failed.failure.message for failed in outcome.of(Failed) if failed.rank == 1)
        assert "n2 does not reach" in text, text
    finally:
        client.close()


def test_hosts_that_reach_one_another_meet(net: Net) -> None:
    client = PoolClient(CommandPool(**net.options, nodes="2"))
    try:
        assert client.run(client.group(2), MEETS, strategy="ddp").values == {0: 2.0, 1: 2.0}
    finally:
        client.close()


def test_the_doctor_says_it(net: Net, tmp_path: Path) -> None:
    lines = [f"{key} = {value!r}" for key, value in net.options.items()]
    write_trusted(tmp_path, "\n".join(['pool = "box"', "[pools.box]", 'kind = "command"', *lines, "nodes = 2", ""]))
    net.within(1, LOST)
    with Notebook(tmp_path) as book:
        book.ok("%load_ext jupyter_distrib")
        book.ok("%%distributed --ranks 2\nrank")
        told = book.ok("%distributed_status --doctor").text
        assert "n2 does not reach" in told, told
