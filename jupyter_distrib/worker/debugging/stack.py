"""The Python stack of this process's main thread at a moment, for somebody who asks where a rank is.

Called in the rank's control thread, or, for the inline pool, in the thread that asks in the kernel.
"""

from __future__ import annotations

import sys
import threading
import time
import types
from collections.abc import Iterator

from jupyter_distrib.system import file_owner
from jupyter_distrib.wire import messages as m
from jupyter_distrib.worker.failure import ends_of, frame_at


def seen(run: str, rank: int) -> m.StackSeen:
    """Return the stack of the main thread, which goes on meanwhile."""
    frames = sys._current_frames()  # noqa: SLF001 - the only way to see another thread
    stack = _outermost_first(frames.get(threading.main_thread().ident or 0))
    return m.StackSeen(run=run, rank=rank, frames=ends_of(_of_cell(stack)), at_s=time.monotonic())


def _outermost_first(frame: types.FrameType | None) -> list[types.FrameType]:
    def walk(frame: types.FrameType | None) -> Iterator[types.FrameType]:
        while frame is not None:
            yield frame
            frame = frame.f_back

    return list(walk(frame))[::-1]


def _of_cell(stack: list[types.FrameType]) -> list[m.Frame]:
    """Return the frames that this package has called: the cell's, and those of the libraries that it calls."""
    own = [file_owner.is_own(frame.f_code.co_filename) for frame in stack]
    first = own.index(True) if True in own else 0
    return [
        frame_at(frame.f_code, frame.f_lineno, frame.f_lasti)
        for frame, is_own in zip(stack[first:], own[first:], strict=True)
        if not is_own
    ]
