"""The record of one rank of a run: the fold of the events that concern this rank alone. Kernel side; no clock, standard
library only. `kernel/record/record.py` has the rest: output, displays and reported numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias, assert_never

from jupyter_distrib.kernel.record import nested_progress
from jupyter_distrib.kernel.record.displays import Displays
from jupyter_distrib.kernel.record.not_finite import NotFinite
from jupyter_distrib.kernel.record.terminal_stream import Progress
from jupyter_distrib.kernel.record.timeline import Course, Seen
from jupyter_distrib.system.data_class import data_class
from jupyter_distrib.wire import messages as m

RankState = Literal["waiting", "starting", "running", "done", "failed", "lost", "interrupted"]
OfOneRank: TypeAlias = (
    m.Started
    | m.Progressed
    | m.Sampled
    | m.StackSeen
    | m.DebuggerPrompted
    | m.DebuggerLeft
    | m.Returned
    | m.Failed
    | m.Interrupted
    | m.Exited
)


@data_class
class Sample:
    """A sample: numbers that a rank reported in one call."""

    step: int
    values: dict[str, float]
    at_s: float
    lost: bool = False
    """Whether an earlier attempt reported it and a later attempt has repeated the step."""


@dataclass(slots=True, kw_only=True)
class RankRecord:
    """The state of one rank of a run. Only `RunRecord.apply` writes it."""

    rank: int
    state: RankState = "waiting"
    pid: int = 0
    device: str = ""
    device_name: str = ""
    progress: tuple[Progress, ...] = ()
    """The progress of nested loops, outermost first; empty if the rank reports none."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The last value of every name ever reported."""
    metrics_step: int = 0
    not_finite: dict[str, NotFinite] = field(default_factory=dict)
    """The names whose values were nan or infinite."""
    history: list[Sample] = field(default_factory=list)
    """The reported samples. When the list is full, every second one is dropped, so that it always spans the whole
    run."""
    last_line: str = ""
    failure: m.Failure | None = None
    failed_at_s: float = 0.0
    exit: m.Exited | None = None
    stopped_at: tuple[m.Frame, ...] = ()
    """Frames at which an interrupt reached the rank, outermost first."""
    stack: m.StackSeen | None = None
    """The last Python stack that was requested."""
    prompt: m.DebuggerPrompted | None = None
    """Prompt of the debugger in which the rank is stopped, until the next prompt or until the rank resumes."""
    left_debugger: m.DebuggerLeft | None = None
    """The end of the last stop in the debugger."""
    returned: bool = False
    value: m.Parcel | None = None
    kept: m.KeptNames = field(default_factory=m.KeptNames)
    exited_early: bool = False
    rss_bytes: int = 0
    """The resident memory of its process and of the children that it started; 0 while unknown."""
    peak_rss_bytes: int = 0
    cpu_percent: float = 0.0
    """The processor usage; 100 is one core."""
    gpu_memory_bytes: int | None = None
    peak_gpu_memory_bytes: int | None = None
    gpu_memory_total_bytes: int | None = None
    gpu_percent: float | None = None
    gpu_tensor_bytes: int | None = None
    gpu_reserved_bytes: int | None = None
    times: m.PhaseTimes | None = None
    """The time of its training by phase; None if it does not train."""
    peak_tensor_bytes: int | None = None
    """The peak memory of its tensors on its GPU; None if unknown."""
    gpu_memory_of_all: bool = False
    """Whether the GPU memory counts all processes on the GPU since the rank started; see `Sampled`."""
    course: Course = field(default_factory=Course)
    displays: Displays = field(default_factory=Displays)
    started_at_s: float | None = None
    ended_at_s: float | None = None

    @property
    def finished(self) -> bool:
        return self.state in ("done", "failed", "lost", "interrupted")

    @property
    def gone(self) -> bool:
        """Return whether the rank's process has ended during the run, for any reason, so that the values kept on it are
        lost."""
        return self.exit is not None

    def apply(self, event: OfOneRank) -> None:
        """Apply an event of this rank."""
        match event:
            case m.Started():
                self._start(event)
            case m.Progressed():
                self._progress(event)
            case m.Sampled():
                self._sample(event)
            case m.StackSeen():
                self.stack = event
            case m.DebuggerPrompted():
                self.prompt = event
            case m.DebuggerLeft():
                self.prompt, self.left_debugger = None, event
            case m.Returned():
                self._return(event)
            case m.Failed():
                self._fail(event)
            case m.Interrupted():
                self._interrupt(event)
            case m.Exited():
                self._exit(event)
            case _:
                assert_never(event)

    def _start(self, event: m.Started) -> None:
        self.state, self.pid, self.device, self.started_at_s = "running", event.pid, event.device, event.at_s

    def _progress(self, event: m.Progressed) -> None:
        self.progress = nested_progress.moved_on(self.progress, event)

    def _sample(self, event: m.Sampled) -> None:
        self.rss_bytes, self.cpu_percent = event.rss_bytes, event.cpu_percent
        self.peak_rss_bytes = max(self.peak_rss_bytes, event.rss_bytes)
        self.gpu_memory_total_bytes, self.gpu_percent = event.gpu_memory_total_bytes, event.gpu_percent
        self.gpu_memory_bytes, self.gpu_memory_of_all = event.gpu_memory_bytes, event.gpu_memory_of_all
        self.gpu_tensor_bytes, self.gpu_reserved_bytes = event.gpu_tensor_bytes, event.gpu_reserved_bytes
        self.times = event.times or self.times
        self._follow_course(event)
        if event.gpu_memory_bytes is not None:
            self.peak_gpu_memory_bytes = max(self.peak_gpu_memory_bytes or 0, event.gpu_memory_bytes)

    def _follow_course(self, event: m.Sampled) -> None:
        on_gpu = event.gpu_memory_bytes is not None
        percent = (event.gpu_percent or 0.0) if on_gpu else event.cpu_percent
        memory_bytes = event.gpu_memory_bytes or event.rss_bytes
        self.course.use(percent, memory_bytes)
        waited_s = None if event.times is None else event.times.seconds.get("collective")
        self.course.see(Seen(event.at_s, percent, memory_bytes, waited_s))
        if self.progress:
            self.course.come_to(self.progress, event.at_s)
        elif self.times is not None:
            self.course.count(self.times.steps, event.at_s)

    def _return(self, event: m.Returned) -> None:
        if self.started_at_s is None:
            self.started_at_s = event.began_at_s
        self.state, self.returned, self.ended_at_s, self.prompt = "done", True, event.at_s, None
        self.value, self.kept, self.exited_early = event.value, event.kept or self.kept, event.exited_early
        self.times = event.times or self.times
        self.peak_tensor_bytes = event.peak_tensor_bytes

    def _fail(self, event: m.Failed) -> None:
        self.state, self.failure, self.failed_at_s, self.ended_at_s = "failed", event.failure, event.at_s, event.at_s
        self.prompt = None

    def _interrupt(self, event: m.Interrupted) -> None:
        self.state, self.stopped_at, self.ended_at_s, self.prompt = "interrupted", event.frames, event.at_s, None
        self.kept = event.kept or self.kept

    def _exit(self, event: m.Exited) -> None:
        self.exit, self.prompt = event, None
        self.peak_rss_bytes = max(self.peak_rss_bytes, event.peak_rss_bytes)
        # A rank that had failed keeps that state, which explains more. The values that it kept are lost in any case.
        if self.state != "failed" and not (self.state == "done" and event.asked):
            self.state, self.ended_at_s = "lost", event.at_s
