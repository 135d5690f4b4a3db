"""Kernels that a server accepts, and those for which it may open no more files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.notebook import ROOT

FULL = """
import os, resource, socket, sys
from jupyter_distrib.server.listener import Listener
from jupyter_distrib.wire.link import Link
sock, clients = socket.socket(socket.AF_UNIX), [socket.socket(socket.AF_UNIX) for _ in range(5)]
sock.bind(sys.argv[1])
listener, (_, hard) = Listener(sock), resource.getrlimit(resource.RLIMIT_NOFILE)
listener.listen()
assert listener.accept() is None
for client in clients:
    client.connect(sys.argv[1])
served = listener.accept()
assert not served.getblocking()
free = os.dup(0)
os.close(free)

def turned_away(client):
    assert listener.accept() is None
    told, _ = Link(client).receive()
    assert told.reason.startswith(f"Too many open files: the limit is {free} for each process"), told
    try:
        client.recv(1)
    except ConnectionError:
        pass
    try:
        os.open(os.devnull, os.O_RDONLY)
    except OSError:
        return
    raise SystemExit("somebody else can have the spare descriptor")

resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
turned_away(clients[1])
turned_away(clients[2])
resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
assert listener.accept() is None, "not even the spare descriptor can be had"
assert listener.accept() is None
resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
turned_away(clients[3])
served.close()
assert listener.accept() is not None, "room again"
assert listener.accept() is None
"""


def test_a_kernel_for_which_there_is_no_room_is_told_so(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path / "socket")],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=60, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
