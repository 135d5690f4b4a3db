"""How a rank sends its events."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator

import pytest

from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.link import Link
from jupyter_distrib.worker.interrupts import CellStage, Interrupts
from jupyter_distrib.worker.messenger import Messenger


@pytest.fixture
def told() -> Iterator[tuple[Messenger, Link]]:
    """A messenger, and the agent's end of its link."""
    mine, theirs = map(Link, socket.socketpair())
    yield Messenger(mine), theirs
    mine.close()
    theirs.close()


def test_an_interrupt_cuts_no_event_in_two(told: tuple[Messenger, Link]) -> None:
    """The agent would take the rest for another frame, and give the rank up with all that it keeps."""
    messenger, theirs = told
    interrupts = Interrupts(messenger)
    interrupts.stage = CellStage.RUNNING
    big = m.Displayed(run="r", rank=0, data={"text/plain": "x" * 2_000_000}, metadata={}, at_s=1.0)
    got = []

    def read() -> None:
        theirs.wait(60_000)  # more is on its way than the socket takes: the main thread is in the midst of it
        os.kill(os.getpid(), signal.SIGINT)
        got.extend([theirs.receive()[0], theirs.receive()[0]])

    before = signal.signal(signal.SIGINT, interrupts.on_interrupt)
    try:
        reader = threading.Thread(target=read)
        reader.start()
        messenger.send(big)
        messenger.send(m.Cleared(run="r", rank=0, at_s=2.0))
        reader.join(60)
    finally:
        signal.signal(signal.SIGINT, before)

    assert got == [big, m.Cleared(run="r", rank=0, at_s=2.0)]
    assert interrupts.postponed, "the control thread tries it again"


def test_the_start_of_a_cell_that_has_returned_at_once_is_not_an_event_of_its_own(told: tuple[Messenger, Link]) -> None:
    messenger, theirs = told
    start, end = (
        m.Started(run="r", rank=0, pid=5, device="cpu", at_s=1.0),
        m.Returned(run="r", rank=0, value=None, began_at_s=1.0, at_s=2.0),
    )

    messenger.begin(start)
    messenger.send(end)
    messenger.begin(start)
    messenger.announce(2)
    messenger.send(end)

    assert [theirs.receive()[0] for _ in range(3)] == [end, start, end]


def test_the_start_of_a_cell_that_begins_late_is_sent_as_soon_as_it_does(told: tuple[Messenger, Link]) -> None:
    messenger, theirs = told
    start, end = (
        m.Started(run="r", rank=0, pid=5, device="cpu", at_s=1.0),
        m.Returned(run="r", rank=0, value=None, began_at_s=1.0, at_s=2.0),
    )

    messenger.announce(1)  # the main thread is busy with what came before the cell
    messenger.begin(start)
    assert theirs.wait(0)
    messenger.send(end)
    messenger.begin(start)  # the next one begins at once
    messenger.send(end)

    assert [theirs.receive()[0] for _ in range(3)] == [start, end, end]


def test_what_a_finalizer_reports_in_the_midst_of_a_send_follows_it(told: tuple[Messenger, Link]) -> None:
    messenger, _ = told
    end = m.Returned(run="r", rank=0, value=None, at_s=2.0)
    inner = m.Cleared(run="r", rank=0, at_s=1.0)

    class Link_:
        def send(self, event: object, fds: object = (), *, after: object = ()) -> None:
            sent.append(event)
            if event is end:
                messenger.send(inner)
                assert sent == [end]

    sent: list[object] = []
    messenger._link = Link_()  # type: ignore[assignment]
    messenger.send(end)

    assert sent == [end, inner]
