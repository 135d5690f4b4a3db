"""Threads that go on after their cell write into their own run."""

from __future__ import annotations

import io
import subprocess
import sys
import textwrap
import threading
from types import SimpleNamespace

import pytest

from jupyter_distrib.wire import messages as m
from jupyter_distrib.worker.output.late_output import LateThreads
from tests.notebook import ROOT


def run(program: str, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # type: ignore[call-overload, no-any-return]
        [sys.executable, "-c", textwrap.dedent(program), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
        **options,
    )


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Standard streams that a test may replace."""
    out, err = io.StringIO(), io.StringIO()
    for name, stream in (("stdout", out), ("__stdout__", out), ("stderr", err), ("__stderr__", err)):
        monkeypatch.setattr(sys, name, stream)
    return SimpleNamespace(out=out, err=err)


class Talker:
    """A thread that prints when it is told to."""

    def __init__(self) -> None:
        self._go, self._done, self._over = threading.Semaphore(0), threading.Semaphore(0), False
        self._text = ""
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while self._go.acquire() and not self._over:
            print(self._text)
            self._done.release()

    def say(self, text: str) -> None:
        self._text = text
        self._go.release()
        self._done.acquire()

    def end(self) -> None:
        self._over = True
        self._go.release()
        self.thread.join()


def test_without_late_threads_the_streams_are_the_plain_ones(streams: SimpleNamespace) -> None:
    late = LateThreads(0, lambda event: pytest.fail("nothing is late"))
    late.begin()
    assert (sys.stdout, vars(streams.out)) == (streams.out, {})
    late.end("r-1")
    late.begin()
    assert (sys.stdout, vars(streams.out)) == (streams.out, {})


def test_no_thread_is_of_a_cell_that_was_stopped_before_it_began(streams: SimpleNamespace) -> None:
    """A rank's first cell may be stopped so early, because another rank has failed; its main thread is not late then."""
    late = LateThreads(0, lambda event: pytest.fail("nothing is late"))
    late.end("r-1")
    late.begin()
    print("of the second cell")
    late.end("r-2")

    assert streams.out.getvalue() == "of the second cell\n"


def test_a_late_thread_writes_to_its_own_run(streams: SimpleNamespace) -> None:
    sent: list[m.Wrote] = []
    late = LateThreads(3, sent.append)
    late.begin()
    talker = Talker()
    talker.say("in time")
    late.end("r-1")
    late.begin()
    talker.say("too late")
    print("of the second cell")
    other = Talker()
    other.say("of the second cell's thread")
    late.end("r-2")
    late.begin()
    talker.say("still the first's")
    other.say("the second's")
    assert streams.out.getvalue() == "in time\nof the second cell\nof the second cell's thread\n"
    texts = {run: "".join(event.text for event in sent if event.run == run) for run in ("r-1", "r-2")}
    assert texts == {"r-1": "too late\nstill the first's\n", "r-2": "the second's\n"}
    assert {event.rank for event in sent} == {3}
    talker.end()
    other.end()
    late.end("r-3")
    late.begin()
    assert (sys.stdout, vars(streams.out)) == (streams.out, {}), "the last late thread has ended"
