"""How a rank sends its events."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from jupyter_distrib.wire.link import Link
from jupyter_distrib.wire.messages import Cleared, Displayed, Returned, Started, WorkerOrder
from jupyter_distrib.worker.main import Worker


@pytest.fixture
def told() -> Iterator[tuple[Worker, Link]]:
    """A worker, and the agent's end of its link."""
    mine, theirs = map(Link, socket.socketpair())
    order = WorkerOrder(group="c", worker="w", agent_pid=1, rank=0, world_size=1, local_rank=0, local_world_size=1)
    yield Worker(order, mine, -1), theirs
    mine.close()
    theirs.close()


def test_an_interrupt_cuts_no_event_in_two(told: tuple[Worker, Link]) -> None:
    """The agent would take the rest for another frame, and give the rank up with all that it keeps."""
    worker, theirs = told
    worker.interruptible = True
    big = Displayed(run="r", rank=0, data={"text/plain": "x" * 2_000_000}, metadata={}, at_s=1.0)
    got = []

    def read() -> None:
        theirs.wait(60_000)  # more is on its way than the socket takes: the main thread is in the midst of it
        os.kill(os.getpid(), signal.SIGINT)
        got.extend([theirs.receive()[0], theirs.receive()[0]])

    before = signal.signal(signal.SIGINT, worker.on_interrupt)
    try:
        reader = threading.Thread(target=read)
        reader.start()
        worker._tell(big)
        worker._tell(Cleared(run="r", rank=0, at_s=2.0))
        reader.join(60)
    finally:
        signal.signal(signal.SIGINT, before)

    assert got == [big, Cleared(run="r", rank=0, at_s=2.0)]
    assert worker._unheard, "the control thread tries it again"


def test_a_cell_that_is_over_at_once_tells_its_start_with_its_end(told: tuple[Worker, Link]) -> None:
    worker, theirs = told
    start, end = (
        Started(run="r", rank=0, pid=5, device="cpu", at_s=1.0),
        Returned(run="r", rank=0, value=None, at_s=2.0),
    )

    worker._unannounced = start
    worker._tell(end)
    worker._unannounced = start
    worker._announce()
    worker._tell(end)

    assert [theirs.receive()[0] for _ in range(3)] == [replace(end, started=start), start, end]
