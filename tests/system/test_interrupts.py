"""Waits that hear an interrupt which came a moment before they began to block."""

from __future__ import annotations

import importlib
import os
import queue
import signal
import sys
import threading
import time
import types
from pathlib import Path
from textwrap import dedent

import pytest

from jupyter_distrib.system import file_owner, interrupts


class Deaf(queue.SimpleQueue[int]):
    """The first `get` is met by a signal that it does not hear, as if it came just before the call blocked."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def get(self, block: bool = True, timeout: float | None = None) -> int:
        self.calls += 1
        if self.calls == 1:
            assert timeout is not None, "it would block for ever"
            raise queue.Empty
        signal.raise_signal(signal.SIGINT)
        return super().get(block, timeout)


def test_an_interrupt_before_the_wait_is_heard() -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupts.get(Deaf())


def test_what_is_there_is_taken_whatever_the_time() -> None:
    box: queue.SimpleQueue[int] = queue.SimpleQueue()
    box.put(1)
    box.put(2)

    assert [interrupts.get(box, 0.0), interrupts.get(box)] == [1, 2]
    with pytest.raises(queue.Empty):
        interrupts.get(box, 0.0)


def test_a_wait_ends_with_its_time_and_with_its_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "HEAR_S", 0.01)
    event = threading.Event()
    began_s = time.monotonic()
    assert not interrupts.wait(event, 0.05)
    assert time.monotonic() - began_s >= 0.05
    threading.Timer(0.05, event.set).start()
    assert interrupts.wait(event)


def test_a_handler_that_does_not_raise_does_not_end_a_wait() -> None:
    heard = []

    def handler(number: int, frame: types.FrameType | None) -> None:
        heard.append(number)

    event = threading.Event()
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        threading.Timer(0.02, signal.raise_signal, [signal.SIGUSR1]).start()
        threading.Timer(0.1, event.set).start()
        assert interrupts.wait(event, 60)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert heard == [signal.SIGUSR1]


def test_an_interrupt_comes_when_the_block_is_over() -> None:
    done = []

    def run() -> None:
        with interrupts.Uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append("block")
        done.append("after")

    with pytest.raises(KeyboardInterrupt):
        run()
    assert done == ["block"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_handler_that_was_there_hears_of_it() -> None:
    heard = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        with interrupts.Uninterrupted():
            signal.raise_signal(signal.SIGINT)
            assert heard == []
        assert heard == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_go_on_as_they_are() -> None:
    seen = []

    def run() -> None:
        with interrupts.Uninterrupted():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


def imported(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, *, library: bool) -> None:
    """Import a module in whose midst Stop is pressed; afterwards it has the name `whole`."""
    (folder / f"{name}.py").write_text(
        dedent("""\
            import signal
            signal.raise_signal(signal.SIGINT)
            whole = True
        """)
    )
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(file_owner, "LIBRARY_FOLDERS", (f"{folder}{os.sep}",) if library else ())
    with interrupts.WholeImports():
        importlib.import_module(name)


def test_an_interrupt_does_not_cut_the_import_of_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        imported(tmp_path, "library_that_is_whole", monkeypatch, library=True)
    assert sys.modules.pop("library_that_is_whole").whole
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_cuts_whatever_else_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt):
        imported(tmp_path, "local_that_is_cut", monkeypatch, library=False)
    assert "local_that_is_cut" not in sys.modules


def test_another_thread_has_no_interrupts_to_hold_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def look() -> None:
        with interrupts.WholeImports():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [before]


def test_an_interrupt_in_a_finalizer_is_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    class Finalized:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    end = interrupts.repeat_swallowed()
    try:
        Finalized()
        with pytest.raises(KeyboardInterrupt):
            interrupts.wait(threading.Event(), 10)
    finally:
        end()
    assert "ignored" not in capsys.readouterr().err


def test_other_exceptions_of_finalizers_are_shown_and_the_repetition_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    class Finalized:
        def __del__(self) -> None:
            raise ValueError

    seen: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "unraisablehook", hook := lambda args: seen.append(args.exc_type))
    end = interrupts.repeat_swallowed()
    Finalized()
    assert seen == [ValueError]
    end()
    assert sys.unraisablehook is hook
