"""Leases this node's GPUs: no agent of the machine gives a GPU to anybody while another agent leases it. Agent's loop.

A lease is a listening socket with the GPU's name in the abstract namespace (unix(7)): the process that binds it has the
GPU. There is no file, so it holds between users, between logins of one user and between a notebook and a Ray cluster on
one machine, whatever their folders are, and it ends with its process, however that ends. A process that asks for a GPU
that is taken connects to the socket, learns the holder's user and process from the system, and the notebook from the
agent itself. Containers with a network of their own have a namespace of their own, too; they are not seen.
"""

from __future__ import annotations

import json
import os
import pwd
import socket
import struct
import time
from contextlib import suppress

from jupyter_distrib.agent.devices import Gpu
from jupyter_distrib.system.event_loop import Loop
from jupyter_distrib.wire.link import peer_uid

ANSWER_S = 0.05
"""Seconds to wait for the name of the notebook; the agent that knows it answers from its loop."""
_NOBODY = "another process"


class Leases:
    """The GPUs that this agent's worker groups hold."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._held: dict[str, tuple[socket.socket, str]] = {}
        """Socket of each lease, and the description of its holder, by UUID."""

    def take(self, gpu: Gpu, holder: str) -> bool:
        """Lease a GPU; return whether it was free."""
        if gpu.uuid in self._held:
            return False
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(_address(gpu))
            listener.listen(16)
            listener.setblocking(False)
        except OSError:
            listener.close()
            return False
        about = {"holder": holder, "since": time.time()}
        self._held[gpu.uuid] = listener, json.dumps(about)
        self._loop.watch(listener.fileno(), lambda: self._answer(gpu.uuid))
        return True

    def give_back(self, gpu: Gpu) -> None:
        """End the lease of a GPU, if this agent has it."""
        held = self._held.pop(gpu.uuid, None)
        if held is not None:
            self._loop.watch(held[0].fileno(), None)
            held[0].close()

    def age_s(self, gpu: Gpu) -> float:
        """Return the age of this agent's lease of a GPU; 0 if it has none."""
        held = self._held.get(gpu.uuid)
        return time.time() - json.loads(held[1])["since"] if held else 0.0

    def holder(self, gpu: Gpu) -> str:
        """Return the holder of a GPU, with the beginning of the lease, as far as they can be determined; empty if it is
        free."""
        if gpu.uuid in self._held:
            return _sentence(self._held[gpu.uuid][1])
        return holder_elsewhere(gpu)

    def _answer(self, uuid: str) -> None:
        """Send a process that has connected the time since which the GPU is taken, and to the same user the notebook's
        name."""
        listener, about = self._held[uuid]
        with suppress(OSError):
            sock, _ = listener.accept()
            with sock:
                if peer_uid(sock) not in (None, os.getuid()):
                    about = json.dumps({"since": json.loads(about)["since"]})
                sock.setblocking(False)
                sock.send(about.encode())


def holder_elsewhere(gpu: Gpu) -> str:
    """Return the holder of a GPU that another process has leased, as `Leases.holder` does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        try:
            sock.connect(_address(gpu))
        except BlockingIOError:  # it has stopped answering
            return _NOBODY
        except OSError:
            return ""
        user = _user_of(sock)
        sock.settimeout(ANSWER_S)
        with suppress(OSError):
            if told := sock.recv(4096).decode(errors="replace"):
                return _sentence(told, user)
        return user or _NOBODY


def _address(gpu: Gpu) -> str:
    return f"\0jupyter_distrib-{gpu.uuid}"


def _sentence(told: str, user: str = "") -> str:
    try:
        about = json.loads(told)
        since = time.strftime("%H:%M", time.localtime(about["since"]))
        return f"{about.get('holder') or user or _NOBODY} since {since}"
    except (ValueError, KeyError, TypeError, AttributeError):  # whatever listens there
        return user or _NOBODY


def _user_of(sock: socket.socket) -> str:
    """Name the user and the process that listen at an address, as the system reports them."""
    try:
        size = struct.calcsize("3i")
        pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    except (OSError, AttributeError):
        return ""
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        name = str(uid)
    return f"user {name} (process {pid})"
