"""The network interfaces of this machine. Standard library only; read anew at each call."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from contextlib import suppress

_SIOCGIFADDR = 0x8915  # netdevice(7), Linux


def addresses() -> dict[str, str]:
    """The IPv4 address of each interface that has one, by name."""
    found = {}
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, suppress(OSError):
            answer = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def nccl_hint(text: str) -> str:
    """What to try when NCCL does not find its way to other nodes; empty if the exception's text is about something
    else."""
    if "ncclInternalError" not in text and "ncclSystemError" not in text:
        return ""
    seen = ", ".join(f"{name} ({address})" for name, address in addresses().items()) or "none with an IPv4 address"
    told = os.environ.get("NCCL_SOCKET_IFNAME")
    return (
        f"NCCL was to use the interface {told}" if told else "NCCL chose an interface by itself"
    ) + f"; this node has {seen}. --env NCCL_SOCKET_IFNAME=NAME names another, --env NCCL_DEBUG=INFO tells more."
