"""Provides interruptible waits for the kernel's main thread, and blocks that an interrupt does not break off.

Python runs the handler of a signal between two steps of the main thread. A signal that arrives after the last step
before a blocking call, and before that call has begun to block, is noticed when the call returns (seen once in some
hundred presses on a busy machine); so no call here blocks for long.
"""

from __future__ import annotations

import _thread
import queue
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")

HEAR_S = 0.2
"""Maximum seconds for which a press of the interrupt button goes unnoticed."""
AGAIN_S = 0.01
_signal = getattr(signal, "_signal", signal)
handler, set_handler = _signal.getsignal, _signal.signal
"""`signal.getsignal` and `signal.signal` without the conversion to enums, which takes most of the time."""


def get(box: queue.SimpleQueue[T], timeout_s: float | None = None) -> T:
    """Call `box.get(timeout=timeout_s)`."""
    for turn_s in _turns(timeout_s):
        try:
            return box.get(timeout=turn_s)
        except queue.Empty:
            continue
    raise queue.Empty


def wait(event: threading.Event, timeout_s: float | None = None) -> bool:
    """Call `event.wait(timeout_s)`."""
    return any(event.wait(turn_s) for turn_s in _turns(timeout_s))


def repeat_swallowed() -> Callable[[], None]:
    """Let an interrupt that is raised in a finalizer, where Python swallows the exception, be repeated in a moment.
    Return a function that ends this."""
    before = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            threading.Timer(AGAIN_S, _thread.interrupt_main).start()
        else:
            before(unraisable)

    def end() -> None:
        if sys.unraisablehook is hook:
            sys.unraisablehook = before

    sys.unraisablehook = hook
    return end


def _turns(timeout_s: float | None) -> Iterator[float]:
    """Yield the seconds to block for, repeatedly until the time is over; at least once."""
    until_s = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        left_s = HEAR_S if until_s is None else max(0.0, until_s - time.monotonic())
        yield min(left_s, HEAR_S)
        if left_s <= HEAR_S and until_s is not None:
            return


class Uninterrupted:
    """A block within which no interrupt is raised: it is raised at the end of the block, which must be short.

    Args:
        instead: Called for the interrupt at the end; without it, the previous handler is called.
    """

    _inside = False
    """Whether such a block is being executed; the outermost one delays the interrupt."""

    def __init__(self, instead: Callable[[], object] | None = None) -> None:
        self._instead = instead
        self._before: Callable[[int, types.FrameType | None], object] | None = None
        self.pressed = False

    def __enter__(self) -> None:
        if Uninterrupted._inside or threading.current_thread() is not threading.main_thread():
            return
        if callable(before := handler(signal.SIGINT)):
            self._before = before
            set_handler(signal.SIGINT, self._note)
            Uninterrupted._inside = True

    def _note(self, number: int, frame: types.FrameType | None) -> None:
        self.pressed = True

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            Uninterrupted._inside = False
            set_handler(signal.SIGINT, self._before)
            if self.pressed:
                self._instead() if self._instead else self._before(signal.SIGINT, None)


class WholeImports:
    """A block in which no interrupt breaks off the import of a library: it is raised at the end of the block.

    Whatever C code of a library has registered by then would stay, and the next import of the library would fail, or
    end the process. Any other line of the block is interrupted as usual.
    """

    def __init__(self) -> None:
        self._before: Callable[[int, types.FrameType | None], object] | None = None
        self._pressed = False

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            before = handler(signal.SIGINT)
            if callable(before):
                self._before = before
                set_handler(signal.SIGINT, self._note)

    def _note(self, number: int, frame: types.FrameType | None) -> None:
        from jupyter_distrib.system.file_owner import importing_library

        if importing_library(frame):
            self._pressed = True
        elif self._before is not None:
            self._before(number, frame)

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            set_handler(signal.SIGINT, self._before)
            if self._pressed:
                self._before(signal.SIGINT, None)
