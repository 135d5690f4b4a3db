"""Leases this node's GPUs: no agent of the machine gives a GPU to anybody while another agent leases that GPU.
Agent's loop.

A lease is a listening socket with the GPU's name in the abstract namespace (unix(7)): the process that binds it has the
GPU. There is no file, so it holds between users, between logins of one user and between a notebook and a Ray cluster on
one machine, whatever their folders are, and it ends with its process, however that ends. A process that asks for a GPU
that is taken connects to the socket, learns the holder's user and process from the system, and the notebook from the
agent itself, if that is the same user's. Any user can bind such a name, so what another user's process sends is not
read. Containers with a network of their own have a namespace of their own, too; they are not seen.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from contextlib import suppress

from jupyter_distrib.agent.gpus.devices import Gpu
from jupyter_distrib.system import outside_text
from jupyter_distrib.system.event_loop import Loop
from jupyter_distrib.wire.link import peer_uid

ANSWER_S = 0.05
"""Seconds to wait for the notebook's name, which the other agent sends from its loop."""
LONGEST_S = 10 * 365 * 86_400.0
"""Maximum plausible age of a lease in seconds; an answer with an older start time does not come from an agent."""
_NOBODY = "another process"


class Leases:
    """The GPUs that this agent's worker groups hold."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._held: dict[str, tuple[socket.socket, str]] = {}
        """Socket of each lease, and the description of its holder, by UUID."""

    def lease(self, gpu: Gpu, holder: str) -> bool:
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
            return _sentence(self._held[gpu.uuid][1].encode())
        return holder_elsewhere(gpu)

    def _answer(self, uuid: str) -> None:
        """Send the notebook's name and the start of the lease to a connected process of the same user. Processes of
        other users learn the holder from the system."""
        listener, about = self._held[uuid]
        with suppress(OSError):
            sock, _ = listener.accept()
            with sock:
                if peer_uid(sock) == os.getuid():
                    sock.setblocking(False)
                    sock.send(about.encode())


def holder_elsewhere(gpu: Gpu) -> str:
    """Describe the holder of a GPU leased by another process, as `Leases.holder` does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        try:
            sock.connect(_address(gpu))
        except BlockingIOError:  # the holder has stopped answering
            return _NOBODY
        except OSError:
            return _NOBODY if _is_bound(gpu) else ""
        uid, holder = _listener_of(sock)
        if uid != os.getuid():
            return holder
        sock.settimeout(ANSWER_S)
        with suppress(OSError):
            return _sentence(sock.recv(4096), holder)
        return holder


def _is_bound(gpu: Gpu) -> bool:
    """Return whether a process has the name of a GPU and does not listen, by the system's list of sockets, unix(7)."""
    name = f" @{_address(gpu)[1:]}\n"
    with suppress(OSError), open("/proc/net/unix", errors="replace") as sockets:
        return any(line.endswith(name) and line.split()[4:5] == ["0001"] for line in sockets)
    return False


def _address(gpu: Gpu) -> str:
    return f"\0jupyter_distrib-{gpu.uuid}"


def _sentence(answer: bytes, otherwise: str = _NOBODY) -> str:
    """Return a readable description of the lease from an agent's answer; `otherwise` if the answer does not come from
    an agent."""
    try:
        match json.loads(answer.decode()):
            case {"holder": str(holder), "since": int() | float() as since}:
                if (name := outside_text.shown(holder)) and abs(time.time() - since) < LONGEST_S:
                    return f"{name} since {time.strftime('%H:%M', time.localtime(since))}"
    except (ValueError, RecursionError, OverflowError, OSError):  # another kind of program listens there
        pass
    return otherwise


def _listener_of(sock: socket.socket) -> tuple[int | None, str]:
    """Return the user who listens at an address, and the names of that user and of the process, as reported by the
    system."""
    try:
        size = struct.calcsize("3i")
        pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    except (OSError, AttributeError):
        return None, _NOBODY
    name = outside_text.user_name(uid)
    return uid, f"user {name} (process {pid})" if uid == os.getuid() else f"user {name} (uid {uid}, process {pid})"
