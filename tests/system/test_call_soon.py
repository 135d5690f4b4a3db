"""Other threads have something done in a loop."""

from __future__ import annotations

import os
import threading

import pytest

from jupyter_distrib.system.call_soon import CallSoon
from jupyter_distrib.system.event_loop import Loop


def test_other_threads_are_heard_in_the_loop_also_where_there_is_no_pipe2(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS."""
    monkeypatch.delattr(os, "pipe2", raising=False)
    loop, heard = Loop(), list[int]()
    calls = CallSoon(loop)
    thread = threading.Thread(
        target=lambda: [*map(calls.put, [lambda: heard.append(1), lambda: heard.append(2), loop.stop])]
    )
    thread.start()
    for fd in calls._read_fd, calls._write_fd:
        assert not os.get_blocking(fd)
        assert not os.get_inheritable(fd)
    while loop._running:
        for key, _ in loop._selector.select():
            key.data[0]()
    thread.join()
    assert heard == [1, 2]
    for fd in calls._read_fd, calls._write_fd:
        os.close(fd)


def test_what_the_loop_itself_puts_waits_its_turn_without_waking_anybody() -> None:
    loop, heard = Loop(), list[int]()
    calls = CallSoon(loop)

    def put() -> None:
        calls.put(lambda: heard.append(2))
        assert heard == [1]
        with pytest.raises(BlockingIOError):
            os.read(calls._read_fd, 1)
        calls.put(loop.stop)

    calls.put(lambda: heard.append(1))  # before the loop runs, as another thread would
    loop.soon(lambda: calls.put(put))
    loop.run()
    assert heard == [1, 2]
    calls.close()
