"""Brings another connection to a host's relay when its own has broken.

    relay:        `listen`, a socket in its own folder
    coordinator:  the command once more, with the program of `line` --its input and output--> the relay

The program only hands its own input and output to the relay, so that every byte takes the same way as before. It does
so only if folder and socket are its own user's; the relay takes them only from its own user, and with the secret that
the coordinator gave it when it started.
"""

from __future__ import annotations

import hmac
import json
import os
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from jupyter_distrib.pools.command import bootstrap
from jupyter_distrib.system import process
from jupyter_distrib.wire.link import peer_uid
from jupyter_distrib.wire.pipe_link import PipeLink

NAME = "takeover"
"""Name of the socket in the relay's folder."""
NO_RELAY = (0, 0)
"""The version of Python that the program reports where there is no relay."""
HELLO_S = 5.0
_HELLO_BYTES = 1 << 10

# The program stays until the relay releases it, because the command ends with it.
_PROGRAM = r"""
import array, os, socket, stat, struct, sys

def own(user):
    if user != os.geteuid():
        raise OSError("not ours")

def relay():
    folder = os.open(@FOLDER@, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    status = os.fstat(folder)
    own(status.st_uid if not status.st_mode & 0o077 else -1)
    found = socket.socket(socket.AF_UNIX)
    found.settimeout(@HELLO_S@)
    found.connect("/proc/self/fd/%d/@NAME@" % folder)
    own(struct.unpack("3i", found.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1])
    return found

def answer(version):
    os.write(1, ("\0:@MARK@ %d.%d\n" % version).encode())

try:
    found = relay()
except OSError:
    answer((0, 0))
    os._exit(1)
answer(sys.version_info[:2])
found.sendmsg([@HELLO@], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1]))])
nothing = os.open(os.devnull, os.O_RDWR)
os.dup2(nothing, 0)
os.dup2(nothing, 1)
found.settimeout(None)
found.recv(1)
os._exit(0)
"""


def line(mark: str, folder: str, secret: str, heard: int) -> bytes:
    """Return the line that starts the program. Its answer is that of `bootstrap`'s, with version 0.0 if there is no
    such relay.

    Args:
        mark: Random letters and digits, for `bootstrap.found`.
        folder: The relay's folder.
        secret: The secret that the relay was given at its start.
        heard: Number of messages that have come from it.
    """
    values = {
        "MARK": mark,
        "FOLDER": repr(folder),
        "NAME": NAME,
        "HELLO": repr(hello(secret, heard)),
        "HELLO_S": str(HELLO_S),
    }
    return bootstrap.filled(_PROGRAM, values)


def hello(secret: str, heard: int) -> bytes:
    """Return the message that comes with the pipes."""
    return json.dumps({"secret": secret, "heard": heard}).encode()


def listen(folder: str, secret: str, link: PipeLink) -> None:
    """Take other pipes for a link, in a thread, from now on."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.path.join(folder, NAME))
    listener.listen()
    threading.Thread(
        target=_accept_all, args=(listener, secret, link), name="jupyter_distrib-takeover", daemon=True
    ).start()


def _accept_all(listener: socket.socket, secret: str, link: PipeLink) -> None:
    in_use: socket.socket | None = None
    while True:
        bringer, _ = listener.accept()
        if _accept(bringer, secret, link):
            bringer, in_use = in_use or bringer, bringer
        if bringer is not in_use:
            bringer.close()  # this ends the program at the other end, and its command


def _accept(bringer: socket.socket, secret: str, link: PipeLink) -> bool:
    """Take the pipes that a process brings, if it may bring them; return whether they are in use."""
    if peer_uid(bringer) != os.geteuid():
        return False
    bringer.settimeout(HELLO_S)
    fds: list[int] = []
    with suppress(OSError, ValueError, KeyError, TypeError):
        said, fds, _, _ = socket.recv_fds(bringer, _HELLO_BYTES, 2)
        hello = json.loads(said)
        known = hmac.compare_digest(str(hello["secret"]).encode(), secret.encode())
        if known and len(fds) == 2 and link.resume(fds[0], fds[1], int(hello["heard"])):
            return True
    for fd in fds:
        os.close(fd)
    return False


def identity() -> tuple[str, int, str]:
    """Return a text that identifies this process, even against a later process with the same number on this machine."""
    return _place(), os.getpid(), _started(os.getpid())


def is_gone(holder: Sequence[Any]) -> bool:
    """Return whether the process with this `identity` has ended, as far as that is visible from here."""
    if not holder or holder[0] != _place():
        return False
    return not process.is_alive(holder[1]) or _started(holder[1]) != holder[2]


def _place() -> str:
    """Return a text that is equal for all processes that see one another."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _started(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[19]
    except OSError:
        return ""
