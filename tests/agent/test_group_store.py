"""The ports of a worker group: its store's, and the next, which programs that a cell starts serve."""

from __future__ import annotations

import errno
import socket
import sys
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from jupyter_distrib.agent.groups.rank_table import RankTable
from jupyter_distrib.agent.groups.store import GroupStore
from jupyter_distrib.wire import messages as m
from tests.coordinator.test_worker_group import Later
from tests.processes import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not let two sockets share a port")


@pytest.fixture
def store() -> Iterator[GroupStore]:
    loop = Later()  # there are no ranks, so nothing is waited for
    command = m.OpenWorkerGroup(group="g", size=2, gpus=False)
    made = GroupStore(
        command,
        RankTable(),
        emit=lambda event, fds: None,
        loop=loop,  # type: ignore[arg-type]
        on_reset_awaited=lambda: None,
    )
    made.renew()
    yield made
    made.close()


def bound(port: int) -> int:
    """Bind a port as a server does that shares it with nobody; return the error."""
    with socket.socket() as sock:
        return errno.EADDRINUSE if _fails(sock, port) else 0


def _fails(sock: socket.socket, port: int) -> bool:
    try:
        sock.bind(("127.0.0.1", port))
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False


def given_back(port: int) -> bool:
    """Return whether a port is free, once a connection of others that has ended there is forgotten, after a minute."""
    return wait_until(lambda: bound(port) == 0, 70)


def test_the_next_port_is_nobody_elses(store: GroupStore) -> None:
    port = store.next_port
    assert bound(port) == errno.EADDRINUSE
    store.renew()
    assert given_back(port)
    port = store.next_port
    store.close()
    assert given_back(port)


@pytest.mark.usefixtures("torch_keeps_descriptors")
@pytest.mark.parametrize("use_libuv", [True, False])
def test_a_store_of_torch_can_be_served_there(store: GroupStore, use_libuv: bool) -> None:
    port = store.next_port
    for _ in range(2):  # one program after another
        served = dist.TCPStore("127.0.0.1", port, 1, True, timedelta(seconds=5), use_libuv=use_libuv)  # type: ignore[attr-defined]
        served.set("key", "value")
        assert served.get("key") == b"value"
        del served
