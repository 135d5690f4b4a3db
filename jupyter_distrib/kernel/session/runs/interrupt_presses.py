"""Interrupts of the kernel while a thread waits for a run: they stop the run and raise no exception. Main thread."""

from __future__ import annotations

import signal
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from jupyter_distrib.kernel.analysis import failures
from jupyter_distrib.kernel.session.runs.cell_sources import cell_name
from jupyter_distrib.system import interrupts
from jupyter_distrib.wire import messages as m

Handler = Callable[[int, types.FrameType | None], object]
LATE_S = 1.0
"""Seconds after the end of a stopped run in which another press counts as meant for that run."""


@contextmanager
def interrupts_as_orders(order: Callable[[], object], *, stopped: Callable[[], bool]) -> Iterator[None]:
    """Call `order` instead of raising an exception for interrupts while this thread waits: an exception between two
    lines would leave the run behind.

    The previous handler, Python's own or a library's (Spark's, say), is put back before anything else runs, a second
    later if the run was `stopped`.
    """
    before = interrupts.handler(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    if isinstance(before, LateInterrupts):
        before = before.successor
    interrupts.set_handler(signal.SIGINT, lambda signum, frame: order())
    try:
        yield
    finally:
        interrupts.set_handler(signal.SIGINT, LateInterrupts(before) if stopped() else before)


class LateInterrupts:
    """A signal handler that swallows presses meant for a run that has just stopped, then gives way to `successor`.

    A press that reached ipykernel (7.4) while it shows the first press would cost the cell its reply: the front end
    would wait for ever. ipykernel sets its own handler for each cell.
    """

    def __init__(self, successor: Handler) -> None:
        self.successor = successor
        self._until_s = time.monotonic() + LATE_S

    def __call__(self, signum: int, frame: types.FrameType | None) -> None:
        if time.monotonic() >= self._until_s:
            signal.signal(signum, self.successor)
            self.successor(signum, frame)


def early_interrupt(interrupt: KeyboardInterrupt) -> KeyboardInterrupt:
    """Return the exception to raise, outside any `except` block, for an interrupt before the kernel waited for a run;
    the interrupt of a run is returned unchanged.

    IPython cannot show every such interrupt: Python 3.11 may raise it where a generator begins, which has no line, and
    IPython 9 fails to format a frame without one, so the cell would end without an error.
    """
    if "_render_traceback_" in vars(interrupt):
        return interrupt
    return failures.to_early_interrupt(
        [
            m.Frame(filename=cell_name(frame.f_code.co_filename), line=line, function=frame.f_code.co_name)
            for frame, line in traceback.walk_tb(interrupt.__traceback__)
            if line
        ]
    )
