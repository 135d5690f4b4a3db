"""Reports where a rank is: the answers to `Probe` give the position of its main thread and the progress of its process
groups; `stack_of_main_thread` returns its whole Python stack.

The prober runs in the rank's control thread, about once a second while a cell runs, in well under a millisecond: it
reads the frames of the main thread and its clock. The framework reads the state of the groups, which may take tens
of milliseconds, only when that thread has not moved for a while, or when another rank waits.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator

from jupyter_distrib.interfaces.framework import Sightings
from jupyter_distrib.system import file_owner, running_program
from jupyter_distrib.wire import messages as m
from jupyter_distrib.worker.failure import ends_of, frame_at

_RUNPY = "<frozen runpy>"
"""File name of the frames that run a script."""
DEEP_AFTER_S = 2.5
BUSY_S = 0.01
"""CPU seconds between two probes up to which a thread counts as idle."""


class Prober:
    """Answers probes. It remembers the previous one, to report the time since the last change."""

    def __init__(
        self,
        rank: int,
        sightings: Sightings,
        device_memory: Callable[[], tuple[int, int] | None] = lambda: None,
        phase_times: Callable[[], m.PhaseTimes | None] = lambda: None,
        *,
        in_debugger: Callable[[], bool] = lambda: False,
    ) -> None:
        self._rank, self._sightings, self._device_memory = rank, sightings, device_memory
        self._phase_times, self._in_debugger = phase_times, in_debugger
        self._main = threading.main_thread().ident or 0
        self._begin("", "")

    def _begin(self, run: str, filename: str) -> None:
        self._run, self._filename = run, filename
        self._movement = _Movement(self._main)
        self._groups: tuple[m.GroupSighting, ...] | None = None

    def begin(self, run: str, filename: str) -> None:
        """Count collectives from now on. Called in the main thread before each cell."""
        self._begin(run, filename)
        self._sightings.begin()

    def probe(self, *, deep: bool) -> m.ProbeAnswer:
        frames = list(_frames(sys._current_frames().get(self._main)))  # noqa: SLF001 - the only way to see a thread
        now_s = time.monotonic()
        if self._movement.update(frames, self._sightings.counts(), now_s):
            self._groups = None
        unmoved_s = now_s - self._movement.moved_s
        if deep or (unmoved_s >= DEEP_AFTER_S and self._groups is None):
            self._groups = self._sightings.inspect_groups()
        tensor_bytes, reserved_bytes = self._device_memory() or (None, None)
        return m.ProbeAnswer(
            run=self._run,
            rank=self._rank,
            line=next((frame.f_lineno for frame in frames if frame.f_code.co_filename == self._filename), None),
            function=_function(frames, self._filename, self._sightings.communication),
            call=_call(frames, self._sightings.communication),
            unmoved_s=unmoved_s,
            idle_s=now_s - self._movement.busy_s,
            groups=self._groups,
            tensor_bytes=tensor_bytes,
            reserved_bytes=reserved_bytes,
            times=self._phase_times(),
            in_debugger=self._in_debugger(),
            program=running_program.line(frames[0] if frames else None, self._filename),
        )

    def nothing_seen(self) -> m.ProbeAnswer:
        """Return the answer for a failed inspection, in which the position is unknown."""
        return m.ProbeAnswer(
            run=self._run,
            rank=self._rank,
            line=None,
            function="",
            call="",
            unmoved_s=0.0,
            idle_s=0.0,
            groups=None,
            in_debugger=self._in_debugger(),
        )


class _Movement:
    """When a thread was last seen to change its position, and to use the CPU."""

    def __init__(self, thread: int) -> None:
        self._thread = thread
        self._mark: object = None
        self._cpu_s = 0.0
        self.moved_s = self.busy_s = time.monotonic()

    def update(self, frames: list[types.FrameType], counts: object, now_s: float) -> bool:
        """Compare with the previous probe; return whether the thread has moved.

        Args:
            frames: Its frames.
            counts: Numbers that change with every collective.
            now_s: The time, by `time.monotonic`.
        """
        cpu_s = _cpu_s(self._thread)
        if cpu_s - self._cpu_s > BUSY_S:
            self.busy_s = now_s
        self._cpu_s = cpu_s
        mark = ([(id(frame.f_code), frame.f_lasti) for frame in frames], counts)
        if mark == self._mark:
            return False
        self._mark, self.moved_s = mark, now_s
        return True


def _cpu_s(thread: int) -> float:
    """Return the CPU time of a thread; 0 where the system does not provide it (macOS)."""
    return time.clock_gettime(time.pthread_getcpuclockid(thread)) if hasattr(time, "pthread_getcpuclockid") else 0.0


def _frames(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    """Yield a frame and its callers, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _function(frames: list[types.FrameType], filename: str, communication: tuple[str, ...]) -> str:
    """Return the running function of the cell, the library function that the cell has called, or the line of a script
    that it runs."""
    called = ""
    for frame in frames:
        code = frame.f_code
        if code.co_filename == filename:
            return called or ("" if code.co_name == "<module>" else f"{code.co_name}()")
        if not code.co_filename.endswith(communication) and not file_owner.is_own(code.co_filename):
            called = _named(frame, called)
    return called


def _named(frame: types.FrameType, called: str) -> str:
    code, file = frame.f_code, os.path.basename(frame.f_code.co_filename)
    if code.co_filename == _RUNPY:
        return called
    return f"{file}, line {frame.f_lineno}" if code.co_name == "<module>" else f"{code.co_name}() ({file})"


def _call(frames: list[types.FrameType], communication: tuple[str, ...]) -> str:
    """Return the outermost of the innermost calls inside the framework's communication: the function that the code
    called."""
    called = ""
    for frame in frames:
        code = frame.f_code
        if code.co_filename.endswith(communication):
            called = called if code.co_name.startswith("_") or code.co_name == "wrapper" else code.co_name
        elif not file_owner.is_own(code.co_filename):
            break
    return called


def stack_of_main_thread(run: str, rank: int) -> m.StackSeen:
    """Return a snapshot of the main thread's Python stack; the thread keeps running."""
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
    """Return the frames called by this package: those of the cell and of the libraries that it calls."""
    own = [file_owner.is_own(frame.f_code.co_filename) for frame in stack]
    first = own.index(True) if True in own else 0
    return [
        frame_at(frame.f_code, frame.f_lineno, frame.f_lasti)
        for frame, is_own in zip(stack[first:], own[first:], strict=True)
        if not is_own
    ]
