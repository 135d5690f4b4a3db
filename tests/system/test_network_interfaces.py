"""What a rank says when NCCL does not find its way to other nodes."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from jupyter_distrib.system import network_interfaces
from jupyter_distrib.worker import failure

NCCL = (
    "NCCL error in: ProcessGroupNCCL.cpp:93, internal error - please report this issue to the NCCL developers, NCCL "
    "version 2.27.5\nncclInternalError: Internal check failed.\nLast error:\nsocketStartConnect: Connect to 10.0.0.9"
)


def test_the_interfaces_of_this_machine_have_addresses() -> None:
    assert network_interfaces.addresses()["lo"] == "127.0.0.1"


TWO_NETWORKS = """
ip link set lo up
for n in 1 2; do
    ip link add net$n type veth peer name far$n && ip link set net$n up && ip link set far$n up
    ip addr add 10.$n.0.2/24 dev net$n && ip addr add fd0$n::2/64 dev net$n nodad
done
"""


@pytest.mark.parametrize(
    ("others", "own", "name"),
    [
        (["10.1.0.3"], "10.1.0.2", "net1"),
        (["10.2.0.3"], "10.1.0.2", "net2"),  # Ray knows the node by its address in another network
        (["10.2.0.3"], "10.9.0.2", "net2"),  # ... or by one that only its machine has
        (["fd02::3"], "fd01::2", "net2"),
        (["10.7.0.3", "10.2.0.3"], "10.1.0.2", "net2"),
        ([], "10.1.0.2", "net1"),
        (["127.0.0.3"], "127.0.0.2", "lo"),
        (["10.7.0.3"], "10.7.0.2", "lo"),
    ],
)
def test_the_interface_is_the_one_by_which_the_others_are_reached(others: list[str], own: str, name: str) -> None:
    """In a network of this test's own, with two interfaces."""
    code = f"from jupyter_distrib.system import network_interfaces as interfaces; print(interfaces.towards({others}, {own!r}))"
    script = f'set -e\n{TWO_NETWORKS}\nexec {sys.executable} -c "{code}"'
    done = subprocess.run(("unshare", "-rn", "sh", "-c", script), capture_output=True, text=True, check=False)
    if "net1" not in done.stdout + done.stderr and done.returncode:
        pytest.skip(f"no network can be made here: {done.stderr}")
    assert done.stdout.strip() == name, done.stderr


@pytest.mark.parametrize(
    ("told", "begins"),
    [
        ("eth7", "NCCL was to use the interface eth7; this node has "),
        ("=eth7", "NCCL was to use the interface eth7; this node has "),
        (None, "NCCL chose an interface by itself; this"),
    ],
)
def test_the_hint_names_what_was_used_and_what_is_there(
    told: str | None, begins: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if told:
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", told)
    else:
        monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    (hint,) = failure.describe(RuntimeError(NCCL), run="r", by_value=False).notes
    assert hint.startswith(begins)
    assert re.search(r"\blo \(127\.0\.0\.1\).*--env NCCL_SOCKET_IFNAME=NAME names another", hint)


def test_other_errors_get_no_such_hint() -> None:
    assert failure.describe(RuntimeError("NCCL is mentioned"), run="r", by_value=False).notes == ()


DUPLICATE = (
    "NCCL error in: ProcessGroupNCCL.cpp:93, invalid usage, NCCL version 2.27.5\nncclInvalidUsage: This usually reflects "
    "invalid usage of NCCL library.\nLast error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000"
)


def test_two_ranks_on_slices_of_one_gpu_are_told_that_nccl_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-4f3b")
    assert network_interfaces.nccl_hint(DUPLICATE).startswith("NCCL joins no two slices of one GPU (MIG): ")


def test_two_ranks_on_one_gpu_are_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert "cuda:0, .cuda(0) and set_device(0) are the same GPU on every rank" in network_interfaces.nccl_hint(
        DUPLICATE
    )
    assert "NCCL_DEBUG=WARN" in network_interfaces.nccl_hint(DUPLICATE.partition("Last error")[0])


@pytest.mark.parametrize(("last", "why"), [("out of memory", "that is full:"), ("unknown error", "does not work:")])
def test_a_call_of_cuda_that_fails_in_nccl_is_called_so(last: str, why: str) -> None:
    text = f"NCCL error in: NCCLUtils.cpp:93, unhandled cuda error\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 '{last}'"
    hint = network_interfaces.nccl_hint(text)
    assert why in hint
    assert "NCCL_DEBUG=INFO" in hint
