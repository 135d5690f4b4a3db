"""Measures the network between the nodes of a worker group, for the doctor. In each rank, in the thread that
executes cells and in a thread that answers.

The first rank of each node measures the connection to the next node; all at the same time, as in a ring of collectives.
Standard library only.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from contextlib import suppress

from jupyter_distrib.interfaces import framework
from jupyter_distrib.system import network_interfaces

PINGS = 20
SEND_S = 0.4
"""Seconds of sending at full speed."""
WAIT_S = 3.0
"""Maximum seconds to wait for a node that does not answer."""
_CHUNK = bytes(1 << 20)
_PING = b"p"


def measure() -> dict[str, object] | None:
    """Return the latency in seconds and the bandwidth in bytes per second from this rank's node to the next, or why
    they cannot be measured; None on a rank that is not the first of its node, or if there is one node. Called on all
    ranks of a group."""
    assert framework.current is not None
    exchange = framework.current.groups.exchange
    first = int(os.environ["GROUP_WORLD_SIZE"]) > 1 and os.environ["LOCAL_RANK"] == "0"
    with _listening() if first else socket.socket() as server:
        token = secrets.token_hex(16)
        addresses = exchange(f"{server.getsockname()[0]} {server.getsockname()[1]} {token}" if first else "")
        nodes = [text.split() for text in addresses if text]
        if not first:
            exchange("")
            return None
        answering = threading.Thread(target=_answer, args=(server, token), daemon=True)
        answering.start()
        own = [node[2] for node in nodes].index(token)
        address, port, theirs = nodes[(own + 1) % len(nodes)]
        try:
            latency_s, per_s = _measure(address, int(port), theirs)
            found: dict[str, object] = {"latency_s": latency_s, "bytes_per_s": per_s}
        except OSError as error:
            found = {"error": f"{address} cannot be reached ({error})"}
        exchange("")  # no rank closes its socket while another one measures
    return {"node": own, "to": (own + 1) % len(nodes), **found}


def _listening() -> socket.socket:
    """Return a listening socket at the address by which other nodes reach this one."""
    return network_interfaces.listen(network_interfaces.source(os.environ["MASTER_ADDR"]))


def _answer(server: socket.socket, token: str) -> None:
    """Answer the caller that knows the token: each ping, then the end of its data."""
    server.settimeout(WAIT_S)
    with suppress(OSError):
        while True:
            peer, _ = server.accept()
            with peer:
                peer.settimeout(WAIT_S)
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if not secrets.compare_digest(peer.recv(len(token), socket.MSG_WAITALL), token.encode()):
                    continue
                for _ in range(PINGS):
                    peer.sendall(peer.recv(1))
                buffer = bytearray(len(_CHUNK))
                while peer.recv_into(buffer):
                    continue
                peer.sendall(_PING)
                return


def _measure(address: str, port: int, token: str) -> tuple[float, float]:
    """Return half of the shortest round trip in seconds, and the bytes per second."""
    with socket.create_connection((address, port), WAIT_S) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.sendall(token.encode())
        trips = []
        for _ in range(PINGS):
            began_s = time.perf_counter()
            peer.sendall(_PING)
            if not peer.recv(1):
                raise ConnectionError("the connection was closed")
            trips.append(time.perf_counter() - began_s)
        began_s, sent = time.perf_counter(), 0
        while time.perf_counter() < began_s + SEND_S:
            peer.sendall(_CHUNK)
            sent += len(_CHUNK)
        peer.shutdown(socket.SHUT_WR)
        peer.recv(1)
        return min(trips) / 2, sent / (time.perf_counter() - began_s)
