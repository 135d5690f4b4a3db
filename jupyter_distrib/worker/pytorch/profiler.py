"""Profiles a cell on one rank (`--profile`): torch's profiler records some steps of its training. Rank's main thread.

    cell begins      records, in case no optimizer ever steps; at most for WHOLE_S
    step WARM_UP     drops that, and records the next steps; at most for STEPS_S
    ... + steps      makes its part of the trace and sends it; the training goes on
    cell ends        sends what there is, also if the cell was stopped or raised

If the cell uses torch's profiler itself, ours stops.
"""

from __future__ import annotations

import ctypes
import gzip
import json
import os
import socket
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from jupyter_distrib.interfaces import identity
from jupyter_distrib.system import scratch
from jupyter_distrib.wire import messages as m
from jupyter_distrib.worker.pytorch import private, trace_events
from jupyter_distrib.worker.pytorch.phase_clock import PhaseClock
from jupyter_distrib.worker.pytorch.trace_events import Part, Span

WARM_UP = 3
"""Steps before the recorded ones: the first ones allocate what later steps reuse."""
WHOLE_S, STEPS_S = 3.0, 10.0
"""Maximum seconds to record of a cell without steps, and of steps."""
EVENTS, FEWEST_EVENTS = 1_000_000, 10_000
"""Maximum number of events of all ranks together, and the number that each rank may always have."""
STOPPED_EVENTS = 60_000
"""Maximum number of events to write when the rank is being stopped, which leaves it two seconds."""
MEMORY_BYTES = 64_000_000
TAKEN = "the cell uses torch's profiler itself, so --profile leaves it alone"
NO_TIME = "there was no time to write so many events when the cell was stopped"
CUT = "there were too many events, so the later ones are left out"


@dataclass(slots=True, kw_only=True)
class _Recording:
    """A recording; holds the profiler's result once it is stopped."""

    first: int
    """Number of the first recorded step, counted from 1."""
    began_s: float
    ends_s: list[float] = field(default_factory=list)
    """The end of each step."""
    spans: list[Span] = field(default_factory=list)
    """The phases of the steps."""
    stopped_s: float = 0.0
    result: Any = None
    memory: bytes = b""

    @property
    def steps(self) -> list[Span]:
        starts_s = [self.began_s, *self.ends_s]
        pairs = enumerate(zip(starts_s, self.ends_s, strict=False), start=self.first)
        return [(f"step {number}", start_s, end_s) for number, (start_s, end_s) in pairs]

    @property
    def end_s(self) -> float:
        return self.ends_s[-1] if self.ends_s else self.stopped_s

    def phases(self) -> dict[str, float]:
        """Return the seconds of each phase in the steps."""
        found: dict[str, float] = {}
        for name, start_s, end_s in self.spans if self.ends_s else ():
            if (inside_s := min(end_s, self.end_s) - max(start_s, self.began_s)) > 0:
                found[name] = found.get(name, 0.0) + inside_s
        return found


class CellProfiler:
    """The profiler of one cell.

    Args:
        empty: This rank's part before anything is recorded; its `began_s` is the offset in seconds from this rank's
            clock to that of the other ranks.
        steps: The number of steps to record.
        ranks: The number of ranks that share the size of the trace.
        name: Name of this rank in the trace.
        send: Sends the part.
    """

    def __init__(
        self,
        empty: m.Profiled,
        clock: PhaseClock,
        *,
        steps: int,
        ranks: int,
        name: str,
        on_gpu: bool,
        send: Callable[[m.Profiled], None],
    ) -> None:
        self._part, self._clock, self._send = empty, clock, send
        self._steps, self._most = steps, max(FEWEST_EVENTS, EVENTS // ranks)
        self._name, self._on_gpu = name, on_gpu
        self._recording: _Recording | None = None
        self._timer = threading.Timer(WHOLE_S, self._stop_soon)
        self._timer.daemon = True

    def begin(self) -> None:
        """Start profiling when the cell begins."""
        self._clock.on_step = self._stepped
        private.before_profilers(self._give_way)
        self._timer.start()
        self._start(first=1)

    def end(self, *, stopped: bool) -> None:
        """Stop when the cell ends, and send the recording unless it was sent. `stopped`: the rank has little time
        left."""
        if self._clock.on_step is None:
            return
        self._stop(memory=not stopped)
        recording = self._recording
        if stopped and recording is not None and private.event_count(recording.result) > STOPPED_EVENTS:
            self._recording, self._part = None, replace(self._part, note=NO_TIME)
        self._finish()

    def _stepped(self) -> None:
        """Record the end of a step of the training."""
        now_s = time.monotonic()
        recording = self._recording
        if self._clock.steps == WARM_UP:
            self._stop(memory=False)
            self._timer.cancel()
            return self._start(first=WARM_UP + 1)
        if recording is None or recording.result is not None:
            return None
        recording.ends_s.append(now_s)
        if recording.first > 1 and (len(recording.ends_s) >= self._steps or now_s - recording.began_s > STEPS_S):
            self._stop()
            self._finish()
        return None

    def _start(self, first: int) -> None:
        """Start recording. If the profiler does not work, this is reported, and the cell continues."""
        try:
            private.start_profiler(on_gpu=self._on_gpu)
        except Exception as error:  # noqa: BLE001 - an error of torch, from a library or a driver without a profiler
            self._recording = None
            self._part = replace(self._part, note=f"torch's profiler does not work here: {error}")
            return self._finish()
        self._recording = _Recording(first=first, began_s=time.monotonic())
        self._clock.spans = self._recording.spans
        return None

    def _stop(self, *, memory: bool = True) -> None:
        """Stop recording. Collecting the history of a GPU's memory may take seconds."""
        recording = self._recording
        if recording is None or recording.result is not None:
            return
        self._clock.spans = None
        recording.stopped_s = time.monotonic()
        recording.result = private.stop_profiler()
        if self._on_gpu:
            recording.memory = private.memory_history(wanted=memory)

    def _stop_soon(self) -> None:
        """Have the main thread stop the first recording, since profilers work per thread. Called in the timer's
        thread."""
        global _due
        _due = self._stop_first
        ctypes.pythonapi.Py_AddPendingCall(_stop_due, None)

    def _stop_first(self) -> None:
        if self._recording is not None and self._recording.first == 1:  # not a recording that has begun meanwhile
            self._stop()

    def _give_way(self) -> None:
        """Release torch's profiler to the cell."""
        self._stop()
        if self._recording is not None and not self._recording.ends_s:
            self._recording = None
        self._part = replace(self._part, note=TAKEN)
        self._finish()

    def _finish(self) -> None:
        """Send this rank's part, and finish."""
        private.before_profilers(None)
        self._clock.on_step = None
        self._timer.cancel()
        self._timer.join()
        recording, self._recording = self._recording, None
        if recording is not None:
            try:
                self._part = self._with(recording)
            except Exception as error:  # noqa: BLE001 - a full disk, or a file of torch that is not JSON
                self._part = replace(self._part, note=f"its events could not be written: {error}")
        self._send(replace(self._part, at_s=time.monotonic()))

    def _with(self, recording: _Recording) -> m.Profiled:
        """Return this rank's part with the recording."""
        part = self._converted(recording)
        return replace(
            self._part,
            trace=gzip.compress("\n".join(part.lines).encode(), 1),
            memory=zlib.compress(recording.memory, 1) if 0 < len(recording.memory) <= MEMORY_BYTES else b"",
            began_s=self._part.began_s + part.began_s,
            first_step=recording.first,
            steps=len(recording.ends_s),
            seconds=recording.end_s - recording.began_s,
            phases=recording.phases(),
            busiest=part.busiest,
            note=self._part.note or (CUT if part.cut else ""),
        )

    def _converted(self, recording: _Recording) -> Part:
        with scratch.folder() as folder:
            path = folder / "trace.json"
            recording.result.save(str(path))  # by way of `trace.json.tmp`
            with path.open(encoding="utf-8", errors="replace") as file:
                recorded = json.load(file, strict=False)
        return trace_events.part_of(
            recorded,
            rank=self._part.rank,
            name=self._name,
            pid=os.getpid(),
            wall_s=time.time() - time.monotonic(),
            steps=recording.steps,
            phases=recording.spans if recording.ends_s else (),
            most=self._most,
        )


def of_cell(command: m.Execute, clock: PhaseClock, offset_s: float, send: Callable[[m.Profiled], None]) -> CellProfiler:
    """Return the profiler of a cell on this rank."""
    order = identity.order()
    return CellProfiler(
        m.Profiled(run=command.run, rank=order.rank, began_s=offset_s),
        clock,
        steps=command.profile,
        ranks=command.run_size or len(command.ranks),
        name=f"rank {order.rank} on {socket.gethostname()}" if identity.several_nodes() else f"rank {order.rank}",
        on_gpu=order.device.startswith("cuda"),
        send=send,
    )


_due: Callable[[], None] | None = None
"""A function for the main thread to call."""


def _call_due(_: object) -> int:
    global _due
    call, _due = _due, None
    if call is not None:
        call()
    return 0


_stop_due = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(_call_due)
