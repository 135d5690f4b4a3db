"""What a server tells a kernel, and when it leaves."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_distrib.server import server
from jupyter_distrib.server.server import Server
from jupyter_distrib.server.worker_group import Client
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.link import Link


class Told:
    """A server with one kernel, whose end of the link is `theirs`."""

    def __init__(self, folder: Path) -> None:
        self._listener, (ours, self.theirs) = socket.socket(socket.AF_UNIX), socket.socketpair()
        self._server: Server[object] = Server(None, self._listener, folder, "agent")  # type: ignore[type-var, arg-type]
        ours.setblocking(False)
        self.client: Client[object] = Client(link=Link(ours))  # type: ignore[type-var]
        self._server.clients.append(self.client)

    def tell(self, *events: m.Event) -> None:
        for event in events:
            self._server.send(self.client, event)

    def turn(self) -> None:
        """Run the loop for one turn."""
        self._server.loop.later(0, self._server.loop.stop)
        self._run()

    def until_sent(self) -> None:
        """Run the loop until something has left."""
        self._server.loop.watch(self.theirs.fileno(), self._server.loop.stop)
        self._run()

    def _run(self) -> None:
        self._server.loop._running = True
        self._server.loop.run()

    @property
    def sent(self) -> bool:
        return bool(select.select([self.theirs], [], [], 0)[0])

    def received(self) -> list[type]:
        """The kinds of what one wait of the kernel gets."""
        return [type(message) for message, _ in Link(self.theirs).read()]

    def close(self) -> None:
        for each in (self._listener, self.theirs, self.client.link):
            each.close()
        self._server.loop._selector.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a server gather for longer than any test takes, also on a busy machine."""
    monkeypatch.setattr(server, "GATHER_S", 600.0)


@pytest.fixture
def told(tmp_path: Path) -> Iterator[Told]:
    one = Told(tmp_path)
    yield one
    one.close()


def started(rank: int) -> m.Started:
    return m.Started(run="r", rank=rank, pid=1, device="cpu", at_s=0.0)


def returned(rank: int) -> m.Returned:
    return m.Returned(run="r", rank=rank, value=None)


@pytest.mark.usefixtures("patient")
def test_the_ends_of_ranks_wait_for_the_end_of_the_run(told: Told) -> None:
    told.tell(started(0), returned(0))
    told.turn()
    assert not told.sent
    told.tell(started(1), returned(1), m.Ended(run="r", at_s=0.0))
    told.turn()
    assert told.received() == [m.Started, m.Returned, m.Started, m.Returned, m.Ended]
    assert told.client.gathering is None


def test_but_not_for_long(told: Told) -> None:
    told.tell(started(0))
    told.until_sent()
    assert told.received() == [m.Started]


@pytest.mark.usefixtures("patient")
def test_what_a_rank_prints_takes_them_along_at_once(told: Told) -> None:
    told.tell(started(0), m.Wrote(run="r", rank=0, stream="stdout", text="x"))
    told.turn()
    assert told.received() == [m.Started, m.Wrote]
