"""The network interfaces of this machine, and the way to other nodes. Standard library only; read anew at each call."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress

from jupyter_distrib.errors import PoolError

LOOPBACK = "lo"
REACH_S = 3.0
"""Seconds to wait for the node of rank 0 to answer at all."""
_SIOCGIFADDR = 0x8915  # netdevice(7), Linux


def addresses() -> dict[str, str]:
    """Return the address of each interface that has one, by name: its IPv4 address, or else an IPv6 address of it that
    reaches beyond the link."""
    found = {name: address for name, address in _addresses_6() if not address.startswith("fe80:")}
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, suppress(OSError):
            answer = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def towards(others: Sequence[str], own: str) -> str:
    """Return the interface through which this machine reaches the others; without others, the interface that has its
    own address. Loopback if none can be determined."""
    names = {address: name for name, address in (*_addresses_6(), *addresses().items())}
    return next((names[found] for address in (*others, own) if (found := source(address)) in names), LOOPBACK)


def family(address: str) -> socket.AddressFamily:
    """Return the address family of an address, or of a name."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def listen(address: str, backlog: int = 128) -> socket.socket:
    """Return a socket that listens on any free port of an address of this machine, IPv4 or IPv6."""
    return socket.create_server((address, 0), family=family(address), backlog=backlog)


def with_port(address: str, port: int) -> str:
    """Return `address:port` as programs read it: an IPv6 address stands in brackets."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def source(address: str) -> str:
    """Return the local source address for packets to an address; nothing is sent. Empty if there is no route."""
    with socket.socket(family(address), socket.SOCK_DGRAM) as sock, suppress(OSError):
        sock.connect((address, 9))
        return str(sock.getsockname()[0])
    return ""


def _addresses_6() -> Iterator[tuple[str, str]]:
    """Return names and IPv6 addresses (proc_net(5))."""
    with suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as file:
        for address, *_, name in map(str.split, file):
            yield name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address))


def reach_first_node(address: tuple[str, int]) -> socket.socket:
    """Return a connection to the node of rank 0. Raises `PoolError` if it cannot be reached: the system, and torch,
    would try for minutes without a word."""
    try:
        return socket.create_connection(address, REACH_S)
    except OSError as error:
        raise PoolError(
            f"node {socket.gethostname()} does not reach the node of rank 0 at {address[0]} "
            f"({error.strerror or error}): open the ports between the nodes, or name another network with --interface "
            "(interface = ...)."
        ) from None


def why_unreachable(own: str) -> str:
    """Return a sentence if processes of this machine cannot reach each other at a loopback address, as in a new network
    namespace, where torch would try for minutes; else an empty text, as for any other address."""
    if not own.startswith("127.") or source(own):
        return ""
    return (
        f"the ranks cannot reach each other at {own}, because the loopback interface of this machine or container is "
        f"down: start it with `ip link set {LOOPBACK} up`."
    )


def gloo_hint(text: str) -> str:
    """Suggest what to try when gloo is to use an interface that does not exist; empty if the exception's text is about
    something else."""
    if "Unable to find address for: " not in text:
        return ""
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "")
    return f"GLOO_SOCKET_IFNAME is {chosen}; {_present()}. Name another interface, or delete the variable."


def _present() -> str:
    seen = ", ".join(f"{name} ({address})" for name, address in addresses().items()) or "none with an address"
    return f"this node has {seen}"


def nccl_hint(text: str) -> str:
    """Suggest what to try when NCCL fails; empty if the exception's text is about something else."""
    if "Duplicate GPU detected" in text and os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-"):
        return (
            "NCCL joins no two slices of one GPU (MIG): take one slice of each GPU, with %env "
            "CUDA_VISIBLE_DEVICES=..., or whole GPUs."
        )
    if "Duplicate GPU detected" in text:
        return (
            "two ranks have used one GPU: cuda:0, .cuda(0) and set_device(0) are the same GPU on every rank. "
            '`device`, and "cuda" without a number, mean the GPU of each rank; under --strategy ddp, cuda:0 does too.'
        )
    if "ncclInvalidUsage" in text:
        return "the ranks have called NCCL in ways that do not fit together; --env NCCL_DEBUG=WARN tells more."
    if "ncclUnhandledCudaError" in text:
        why = "full" if "out of memory" in text else "full, or does not work"
        return (
            f"a call of CUDA has failed inside NCCL, as on a GPU that is {why}: %distributed_status shows the GPUs and "
            "who uses them, --env NCCL_DEBUG=INFO tells more."
        )
    if not any(name in text for name in ("ncclInternalError", "ncclSystemError", "ncclRemoteError")):
        return ""
    chosen = os.environ.get("NCCL_SOCKET_IFNAME")
    return (
        f"NCCL was to use the interface {chosen.removeprefix('=')}" if chosen else "NCCL chose an interface by itself"
    ) + f"; {_present()}. --env NCCL_SOCKET_IFNAME=NAME names another, --env NCCL_DEBUG=INFO tells more."
