"""Events of a run: what happens on its ranks, and its end. Most come from a rank; agent and coordinator forward them to
the kernel.
"""

from __future__ import annotations

from dataclasses import field

from jupyter_distrib.wire.messages.shared import Failure, Frame, Parcel, PhaseTimes, RankPlace, RunEvent, message, part


@message
class Started(RunEvent):
    """A rank executes the cell. Not sent if `Returned` alone follows within 20 ms."""

    run: str
    rank: int
    pid: int
    device: str
    at_s: float


@message
class Wrote(RunEvent):
    """A rank wrote to its standard output or error; batched by the agent."""

    run: str
    rank: int
    stream: str
    """`stdout` or `stderr`."""
    text: str
    """Text decoded with replacement; may end anywhere, even within a line."""
    skipped_lines: int = 0
    """Lines left out before `text` because there were too many to show; all of them are in the log."""
    at_s: float = 0.0


@message
class Progressed(RunEvent):
    """A rank advanced in a loop that it reports with `jupyter_distrib.progress`."""

    run: str
    rank: int
    label: str
    step: int
    total: int | None
    """The loop's end; None if it has no known end."""
    at_s: float


@message
class Measured(RunEvent):
    """A rank reported numbers with `jupyter_distrib.report`."""

    run: str
    rank: int
    step: int
    values: dict[str, float]
    at_s: float


@message
class Noted(RunEvent):
    """A sentence about a run or a rank for the view: `utils.py changed and was imported again`."""

    run: str
    rank: int | None
    text: str


@message
class Saving(RunEvent):
    """The cell saves checkpoints into a folder, which is an absolute path on the rank's machine."""

    run: str
    rank: int
    folder: str
    at_s: float


@message
class Saved(RunEvent):
    """A checkpoint is complete, from which the cell resumes when it is started again. Only from runs that may grow;
    not passed on by the server."""

    run: str
    rank: int
    at_s: float


@message
class Sampled(RunEvent):
    """A rank's process and the children it started were measured; about once a second, only while a run is on."""

    run: str
    rank: int
    rss_bytes: int
    cpu_percent: float
    """Processor usage since the previous sample; 100 is one core."""
    gpu_memory_bytes: int | None
    """Memory used by this rank on its GPU; None for a CPU rank, and where the driver does not report it."""
    gpu_memory_total_bytes: int | None
    gpu_percent: float | None
    """Utilization of the whole GPU in percent."""
    gpu_tensor_bytes: int | None = None
    """Memory of the rank's tensors on its GPU, as its framework counts, about a second ago; None if unknown."""
    gpu_reserved_bytes: int | None = None
    """Memory that the framework has reserved on the GPU, tensors included."""
    times: PhaseTimes | None = None
    """Time of its training by phase, as of about a second ago; None if it does not train."""
    gpu_memory_of_all: bool = False
    """Whether `gpu_memory_bytes` is the growth of the whole GPU's use since the rank's start, because the driver does
    not list processes, as in containers."""
    at_s: float


@message
class Displayed(RunEvent):
    """A rank displayed something that is more than text: a MIME bundle, as in Jupyter's `display_data`."""

    run: str
    rank: int
    data: dict[str, str]
    """MIME type -> content: text as it is, images as base64, JSON types as JSON text."""
    metadata: dict[str, object]
    display_id: str = ""
    update: bool = False
    """Whether it replaces what this rank displayed under the same `display_id`."""
    at_s: float


@message
class Cleared(RunEvent):
    """A rank called `clear_output`: its displays and its printed text disappear; the log keeps the text. Printed
    text travels by another route, so a code within it marks the place (`worker/output/displaying.py`).
    """

    run: str
    rank: int
    number: int = 0
    """The number of the call in this run, from 1; the code has the same number."""
    wait: bool = False
    """Whether it takes effect only when there is something new to show."""
    at_s: float


@message
class Stalled(RunEvent):
    """The run has stalled, for this reason; valid until `Moved` or another `Stalled`. The run goes on."""

    run: str
    text: str
    """One or a few sentences: `rank 0 has not reached all_reduce #2; ranks 1-3 wait there (line 14)`."""
    places: tuple[RankPlace, ...]
    at_s: float


@message
class Moved(RunEvent):
    """The stall is over."""

    run: str
    at_s: float


@message
class StackSeen(RunEvent):
    """The Python stack of a rank's main thread at this moment, because somebody asked for it."""

    run: str
    rank: int
    frames: tuple[Frame, ...]
    """Frames outside this package, outermost first; empty if they cannot be had."""
    trouble: str = ""
    """Reason why the rank did not answer by itself: `is stopped (SIGSTOP)`; empty if it did."""
    at_s: float = 0.0


@message
class Profiled(RunEvent):
    """A rank has recorded its part of the trace for `--profile`, or has none to give."""

    run: str
    rank: int
    trace: bytes = b""
    """Its events as `worker/pytorch/trace_events.py` writes them, compressed by gzip; empty if it has none."""
    memory: bytes = b""
    """The memory history of its GPU, a pickle for pytorch.org/memory_viz, compressed by zlib; empty without a GPU."""
    began_s: float = 0.0
    """Time of the first event on the clock of the run's first node: time 0 of `trace`."""
    first_step: int = 1
    """Number of the first step that was recorded, counted from 1."""
    steps: int = 0
    """Number of steps that were recorded; 0: the cell as a whole."""
    seconds: float = 0.0
    """Seconds covered by the recording."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds of each phase of the steps, as in `PhaseTimes`."""
    busiest: dict[str, float] = field(default_factory=dict)
    """Seconds of the operators (on a GPU: of the kernels) that took longest."""
    note: str = ""
    """Reason why nothing, or less than requested, was recorded."""
    at_s: float = 0.0


@part
class KeptNames:
    """The names of `--keep` that a rank had at the end of a cell."""

    types: dict[str, str] = field(default_factory=dict)
    """The type name of each value."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Tensor size in bytes of each value that holds at least a megabyte."""
    sharded: tuple[str, ...] = ()
    """The names whose values are sharded over the ranks."""


@message
class Returned(RunEvent):
    """A rank reached the end of the cell."""

    run: str
    rank: int
    value: Parcel | None
    """The cell's value; None if the cell does not end with an expression, or its value is None."""
    kept: KeptNames | None = None
    """The values that stay on this rank; None if the cell keeps none."""
    began_at_s: float | None = None
    """Start of the cell, on the clock of `at_s`."""
    at_s: float = 0.0
    exited_early: bool = False
    """Whether the cell called `sys.exit()` or `sys.exit(0)`."""
    sequence: int = -1
    """Number of collectives that the strategy's group has seen on this rank; ranks that differ need a new group. -1: no
    group."""
    times: PhaseTimes | None = None
    """Time of its training by phase; None if it did not train."""
    peak_tensor_bytes: int | None = None
    """Maximum memory that its tensors have had on the GPU at once; None if not measured."""


@message
class Failed(RunEvent):
    """A rank raised an exception."""

    run: str
    rank: int
    failure: Failure
    at_s: float
    awaits_device: bool = False
    """Whether the rank must wait for its device before it is ready again: `DeviceProgress` follows, or its end."""
    broke_device: bool = False
    """Whether the rank's device cannot be used any more, so that the rank ends and is replaced."""


@message
class Interrupted(RunEvent):
    """A rank stopped because it was asked to; its process and kept values live on."""

    run: str
    rank: int
    frames: tuple[Frame, ...]
    """The frames at which it was interrupted."""
    at_s: float
    kept: KeptNames | None = None
    """The values that stay on this rank, as in `Returned`, in the state that the interrupt left them in."""
    awaits_device: bool = False
    """Whether the rank waits for its device, as in `Failed`."""


@message
class Exited(RunEvent):
    """A rank's process ended during a run."""

    run: str
    rank: int
    pid: int
    exit_code: int | None
    """Exit code as `waitpid` returns it: the status, or minus the signal's number; None if unknown."""
    asked: bool
    """Whether it was killed on purpose: after a stop, after the failure of another rank, or for the `reason`."""
    reason: str = ""
    """Reason why the whole run had to end with its ranks: `its ranks were stopped`; empty if there is another cause."""
    last_lines: tuple[str, ...] = ()
    """The end of its standard error (and of the crash report for a fatal signal)."""
    frames: tuple[Frame, ...] = ()
    """Frames at which a fatal signal was raised, as far as the crash report shows them."""
    loading: str = ""
    """Notebook variable being unpickled at the crash; empty if unpickling was complete."""
    cause: str = ""
    """The cause that the rank itself has noted, to follow `because`; empty if it has noted none."""
    out_of_memory: bool = False
    """Whether the kernel's OOM-kill counter rose during the run."""
    memory_limit_bytes: int = 0
    """Memory limit of its control group; 0 if there is none, or it had no effect."""
    peak_rss_bytes: int = 0
    at_s: float = 0.0


@message
class TimedOut(RunEvent):
    """The run has exceeded `limit_s` and is being stopped; `Interrupted` or `Exited` follow."""

    run: str
    limit_s: float
    at_s: float
    stalled: bool = False
    """Whether it is the limit for stalls; the last `Stalled` describes the stall."""
    left: bool = False
    """Whether it is the limit for waits that cannot end, because a rank has left the cell."""


@message
class Restarted(RunEvent):
    """The run has ended for this cause and restarts: its ranks' results so far are void, and every lost rank is
    replaced. The following events belong to the next attempt."""

    run: str
    attempt: int
    """Number of this restart, from 1; with `ranks`, of the last one."""
    max_restarts: int
    cause: str
    """`rank 1 was lost (killed by SIGKILL)`; with `ranks`, the place where it resumes: `at step 120`."""
    ranks: tuple[int, ...] = ()
    """The ranks of the next attempt, if it is begun because there is room for more; empty after a loss."""
    nodes: int = 0
    """The number of nodes of these ranks; 0 on one machine."""
    at_s: float


@message
class RanksReduced(RunEvent):
    """The run goes on with fewer ranks, renumbered from 0, because lost ones cannot be replaced. The next attempt has
    not begun."""

    run: str
    ranks: tuple[int, ...]
    cause: str
    nodes: int = 0
    """The number of nodes of these ranks; 0 on one machine."""
    at_s: float


@message
class Ended(RunEvent):
    """Every rank of the run has ended and all its output was read. The last event of a run."""

    run: str
    at_s: float
    log_directory: str = ""
    """The folder of the ranks' logs; empty if no rank wrote anything."""
    clean: bool = True
    """Whether the groups of these ranks are fit for another run."""
    sequences: tuple[int, ...] = ()
    """The values of `Returned.sequence`: if they differ between ranks, a new group is needed too."""
