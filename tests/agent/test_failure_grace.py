"""The moment that the other ranks have after the first exception, with real processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from jupyter_distrib.agent.runs import run
from jupyter_distrib.agent.runs.run import FailureGrace
from jupyter_distrib.system.process import state_and_cpu_s

SPINS = "print(flush=True)\nwhile True: pass"
WAITS = "print(flush=True)\ninput()"
Start = Callable[[str], int]


@pytest.fixture
def start() -> Iterator[Start]:
    """Call it with a program; returns the pid when the program has begun."""
    processes = []

    def run(program: str) -> int:
        process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        processes.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process.pid

    yield run
    for process in processes:
        process.kill()
        process.communicate()


class Moment:
    """A moment whose time passes when the test calls `look`."""

    def __init__(self, *pids: int) -> None:
        self._calls: list[Callable[[], None]] = []
        self.over = 0
        self.grace = FailureGrace(pids=lambda: pids, later=lambda s, call: self._calls.append(call), on_over=self._end)
        self.grace.start()

    def _end(self) -> None:
        self.over += 1

    def look(self) -> int:
        """Look once at each time that was asked for. Return how often the moment was over."""
        calls, self._calls = self._calls, []
        for call in calls:
            call()
        return self.over


def test_a_rank_that_waits_is_stopped_after_the_moment(start: Start) -> None:
    pid = start(WAITS)
    while state_and_cpu_s(pid)[0] != "S":
        pass

    assert Moment(pid).look() == 1


def test_a_rank_that_gets_no_cpu_goes_on_and_one_that_had_it_is_stopped(start: Start) -> None:
    pid = start(SPINS)
    moment = Moment(pid)
    had_s = state_and_cpu_s(pid)[1]

    assert moment.look() == 0
    while state_and_cpu_s(pid)[1] < had_s + run.GRACE_S:
        pass
    assert moment.look() == 1
    assert moment.look() == 1


def test_the_moment_has_an_end(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "GRACE_LIMIT_S", 0.0)

    assert Moment(start(SPINS)).look() == 1


def test_further_exceptions_do_not_begin_it_again() -> None:
    moment = Moment()
    moment.grace.start()

    assert moment.look() == 1
