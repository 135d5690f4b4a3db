"""Hosts that ssh has reached by IPv6, as it does where a name has an address of both families."""

from __future__ import annotations

import subprocess
import sys

import pytest

from jupyter_distrib.pools.command.pool import CommandPool
from jupyter_distrib.testing import PoolClient

pytestmark = pytest.mark.slow

CELL = """
import os, torch, torch.distributed as dist
total = torch.ones(1)
dist.all_reduce(total)
dist.all_reduce(total, group=dist.new_group([0, 1]))
gathered = [None, None]
dist.all_gather_object(gathered, rank)
(os.environ["MASTER_ADDR"], total.item(), gathered)
"""
OWN_GROUP = """
import subprocess, sys
program = "import torch.distributed as dist; dist.init_process_group('gloo'); dist.barrier(); print('met')"
subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout
"""


@pytest.mark.parametrize("nodes", [1, 2])
def test_ranks_meet_at_an_ipv6_address(nodes: int) -> None:
    start = "env HOST={host} SSH_CONNECTION='::1 50000 ::1 22' {python}"
    pool = CommandPool(hosts="a,b", start=start, python=sys.executable, nodes=str(nodes))
    client = PoolClient(pool)
    try:
        group = client.group(2)
        values = client.run(group, CELL, strategy="ddp").values
        assert values == {rank: ("::1", 4.0, [0, 1]) for rank in range(2)}
        assert client.run(group, OWN_GROUP).values == dict.fromkeys(range(2), "met\n"), "programs meet there, too"
    finally:
        client.close()


def test_the_doctor_measures_between_hosts_at_ipv6_addresses() -> None:
    start = "env HOST={host} SSH_CONNECTION='::1 50000 ::1 22' {python}"
    pool = CommandPool(hosts="a,b", start=start, python=sys.executable, nodes="2")
    client = PoolClient(pool)
    try:
        source = "from jupyter_distrib.worker import network_check\nnetwork_check.measure()"
        values = client.run(client.group(2), source).values
        assert all(value["bytes_per_s"] > 0 for value in values.values()), values
    finally:
        client.close()


ONLY_6 = """
ip link set lo up
ip link add net1 type veth peer name far1 && ip link set net1 up && ip link set far1 up
ip addr add fd01::2/64 dev net1 nodad
"""
CODE = """
from jupyter_distrib.system import network_interfaces as interfaces
from jupyter_distrib.pools.command.piped_relay import own_address
print(interfaces.addresses()['net1'], own_address('net1'), own_address(''))
"""


def test_an_interface_with_an_ipv6_address_alone_can_be_named() -> None:
    script = f'set -e\n{ONLY_6}\nip -6 route add default dev net1\nexec {sys.executable} -c "{CODE}"'
    done = subprocess.run(("unshare", "-rn", "sh", "-c", script), capture_output=True, text=True, check=False)
    if "fd01" not in done.stdout + done.stderr and done.returncode:
        pytest.skip(f"no network can be made here: {done.stderr}")
    assert done.stdout.strip() == "fd01::2 ('fd01::2', 'fd01::2') ('fd01::2', 'fd01::2')", done.stderr
