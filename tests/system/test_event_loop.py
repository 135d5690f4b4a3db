"""The loop of agent and coordinator: timers, descriptors, and the ends of children."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from jupyter_distrib.system.event_loop import Loop


def end(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def loop() -> Iterator[Loop]:
    before = signal.getsignal(signal.SIGCHLD)
    loop = Loop()
    yield loop
    signal.signal(signal.SIGCHLD, before)
    loop._selector.close()


def test_timers_fire_in_order_unless_cancelled(loop: Loop) -> None:
    fired: list[str] = []
    loop.later(0.02, lambda: fired.append("third"))
    loop.later(0.0, lambda: fired.append("first"))
    loop.later(0.0, lambda: fired.append("second"))
    loop.later(0.01, lambda: fired.append("never")).cancel()
    loop.later(0.03, loop.stop)
    loop.run()
    assert fired == ["first", "second", "third"]


def test_a_timer_may_set_another(loop: Loop) -> None:
    fired: list[int] = []

    def again(left: int) -> None:
        fired.append(left)
        loop.later(0, (lambda: again(left - 1)) if left else loop.stop)

    again(3)
    loop.run()
    assert fired == [3, 2, 1, 0]


def test_descriptors_are_watched_and_forgotten(loop: Loop) -> None:
    a, b = socket.socketpair()
    got: list[bytes] = []

    def read() -> None:
        got.append(b.recv(10))
        loop.watch(b.fileno(), None)
        a.send(b"unheard")
        loop.later(0.01, loop.stop)

    loop.watch(b.fileno(), read)
    loop.watch(b.fileno(), read, None)
    a.send(b"heard")
    loop.run()
    assert got == [b"heard"]
    loop.watch(b.fileno(), None)
    a.close()
    b.close()


def test_a_callback_may_take_away_what_another_waits_for(loop: Loop) -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    calls: list[int] = []

    def call(number: int) -> None:
        calls.append(number)
        for _, end in pairs:
            loop.watch(end.fileno(), None)
        loop.stop()

    for number, (end, other) in enumerate(pairs):
        loop.watch(other.fileno(), lambda number=number: call(number))
        end.send(b"x")
    loop.run()
    assert len(calls) == 1
    for one, other in pairs:
        one.close()
        other.close()


def test_the_end_of_a_child_wakes_it(loop: Loop) -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    ended: list[int] = []

    def reaped() -> None:
        if child.poll() is not None:
            ended.append(child.returncode)
            loop.stop()

    loop.on_child_ended = reaped
    loop.later(10, loop.stop)
    began_s = time.monotonic()
    loop.run()
    assert ended == [0]
    assert time.monotonic() - began_s < 5
