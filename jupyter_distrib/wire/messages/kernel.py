"""Messages between a kernel and the agent or coordinator that serves it: worker groups, runs, and what happens in a
run.

The coordinator passes most of it on to agents as it is, and agents pass cells on to ranks.
"""

from __future__ import annotations

from dataclasses import field

from jupyter_distrib.wire.messages.shared import Cell, Failure, Frame, Parcel, RankPlace, Setting, WorkerInfo, message
from jupyter_distrib.wire.messages.status import ServerStatus

DEFAULT_CPU_RANKS = 2
"""The size of a worker group without GPUs, if none was asked for."""
KILL_AFTER_S = 2.0
"""Seconds after `Stop` at which a rank is killed."""


@message
class Hello:
    """The first frame on every link from a kernel. The agent answers `Welcomed` or closes the link."""

    protocol: int
    session: str
    """Random name of this kernel's use of the extension; run ids begin with it."""
    pid: int
    label: str
    """The holder's name in other notebooks: `train.ipynb (kernel 4242)`."""
    notebook: str = ""
    """The notebook's path, the same after a restart of its kernel; empty if the front end does not report it."""
    python: str
    torch: str
    cloudpickle: str
    idle_s: float = 0.0
    """Seconds after which idle ranks that keep nothing give their GPUs back; 0: never."""


@message
class OpenWorkerGroup:
    """Start `size` workers on this node. Answered by `WorkerGroupOpened` or `WorkerGroupRefused`."""

    group: str
    size: int
    """Ranks on this node; 0: one for each visible GPU, or 2 CPU ranks on a node without any."""
    gpus: bool
    """Whether each rank leases a GPU (CPU ranks if the node has no GPU at all); False: CPU ranks."""
    first_rank: int = 0
    world_size: int = 0
    """Ranks on all nodes; 0: the same as `size`."""
    node_rank: int = 0
    host: str = "127.0.0.1"
    """Address by which other nodes reach this one; rank 0's node binds the store to it."""
    interface: str = "lo"
    load_env: dict[str, str] = field(default_factory=dict)
    """Variables that are read when a program loads (`LD_*`, `PYTHON*`, `OMP_*`, ...): if there are any, the ranks are
    exec'd instead of forked from the forkserver."""
    visible: tuple[str, ...] | None = None
    """The kernel's CUDA_VISIBLE_DEVICES, split; None if unset."""
    gpu_type: str = ""
    """Text that the names of the GPUs must contain, in any case: `A10`."""
    wait_s: float = 0.0
    """Seconds to wait for what others hold; `WorkerGroupQueued` reports what that is. 0: refuse at once."""


@message
class Execute:
    """Run a cell on the given ranks of a worker group; the agent hands it on to each worker."""

    run: str
    group: str
    ranks: tuple[int, ...]
    cell: Cell
    inputs: Parcel
    setting: Setting
    run_size: int = 0
    """Number of ranks of the run on all nodes, if `ranks` are those of one node and a coordinator handles all; 0: there
    is no coordinator."""
    detached: bool = False
    timeout_s: float | None = None
    """Seconds after which the agent stops the run and reports it with `TimedOut`."""
    hang_timeout_s: float | None = None
    """Seconds of waiting in one place for other ranks after which the agent stops the run."""
    label: str = ""
    """The run's name in lists: `Cell In[5]`."""


@message
class Stop:
    """Stop a run: interrupt, cut its collectives, and kill what does not end. Safe to send at any time, any number of
    times."""

    run: str
    force: bool = False
    """Whether to kill at once (the second press of the button)."""


@message
class AskStacks:
    """Report where each rank of a run is now. Answered by a `StackSeen` of every rank that still executes the cell."""

    run: str


@message
class Forget:
    """Drop kept values."""

    group: str
    keys: tuple[str, ...]


@message
class CloseWorkerGroup:
    """End a worker group's workers and their children, and give its devices back. A run on them ends with them."""

    group: str
    reason: str = ""
    """Reason for everyone who waits for that run."""
    force: bool = False
    """Whether to kill the workers, instead of giving exit handlers a second."""


@message
class Ask:
    """Ask for the status of the pool. Answered by `Answered` with the same `question`."""

    question: int


@message
class Attach:
    """Send a detached run's whole record again, then its events as they come. Answered by `Attached` or
    `NotAttached`."""

    run: str
    """The run's id; empty for the newest detached run."""


@message
class Welcomed:
    pid: int
    python: str
    torch: str
    cloudpickle: str


@message
class Leaving:
    """The coordinator takes no more worker groups, since it cannot reach the cluster: the next one is for its
    successor."""


@message
class WorkerGroupOpened:
    group: str
    workers: tuple[WorkerInfo, ...]
    gpus: bool
    """Whether each of these ranks has a GPU."""
    node_has_gpus: bool | None = None
    """Whether the kernel's CUDA_VISIBLE_DEVICES lets GPUs through, even if these ranks have none; None if unknown."""
    gpu_problem: str = ""
    """Reason why GPUs of the node cannot be used, a sentence for the user; empty if all is well."""
    notes: tuple[str, ...] = ()
    """Sentences for the head of the first run: the choice of GPUs, and their use by others."""


@message
class WorkerGroupRefused:
    """No worker of this worker group was started, or all were ended again."""

    group: str
    reason: str
    """Sentence for the user: what is missing or who holds it, and what to do."""


@message
class WorkerGroupQueued:
    """The worker group waits, because the user asked for that; sent again when the reason changes."""

    group: str
    reason: str
    """Sentence for the user, as in `WorkerGroupRefused`."""


@message
class WorkerGroupClosed:
    """The worker group is gone: closed on request, or (with a reason) taken away, for example for another notebook."""

    group: str
    reason: str = ""


@message
class WorkerGroupChanged:
    """A rank of an idle worker group was replaced: values kept on it are gone."""

    group: str
    workers: tuple[WorkerInfo, ...]
    lost: tuple[int, ...]


@message
class Started:
    """A rank executes the cell. Not sent if all that comes is `Returned`, within 20 ms."""

    run: str
    rank: int
    pid: int
    device: str
    at_s: float


@message
class Wrote:
    """A rank wrote to its standard output or error; batched by the agent."""

    run: str
    rank: int
    stream: str
    """`stdout` or `stderr`."""
    text: str
    """Text decoded with replacement; ends anywhere, also inside a line."""
    skipped_lines: int = 0
    """Lines left out before `text` because there were too many to show; all of them are in the log."""
    at_s: float = 0.0


@message
class Progressed:
    """A rank moved on in a loop that it reports with `jupyter_distrib.progress`."""

    run: str
    rank: int
    label: str
    step: int
    total: int | None
    """The loop's end; None if it has no known end."""
    at_s: float


@message
class Measured:
    """A rank reported numbers with `jupyter_distrib.report`."""

    run: str
    rank: int
    step: int
    values: dict[str, float]
    at_s: float


@message
class Noted:
    """A sentence about a run or a rank for the view: `utils.py changed and was imported again`."""

    run: str
    rank: int | None
    text: str


@message
class Sampled:
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
    at_s: float


@message
class Displayed:
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
class Cleared:
    """A rank called `clear_output`: its displays go, its output stays."""

    run: str
    rank: int
    at_s: float


@message
class Stalled:
    """The run has stalled, for this reason; valid until `Moved` or another `Stalled`. The run goes on."""

    run: str
    text: str
    """One or a few sentences: `rank 0 has not reached all_reduce #2; ranks 1-3 wait there (line 14)`."""
    places: tuple[RankPlace, ...]
    at_s: float


@message
class Moved:
    """The stall is over."""

    run: str
    at_s: float


@message
class StackSeen:
    """The Python stack of a rank's main thread at this moment, because somebody asked for it."""

    run: str
    rank: int
    frames: tuple[Frame, ...]
    """Frames outside this package, outermost first; empty if they cannot be had."""
    trouble: str = ""
    """Reason why the rank itself did not answer: `is stopped (SIGSTOP)`; empty if it did."""
    at_s: float = 0.0


@message
class Returned:
    """A rank reached the end of the cell."""

    run: str
    rank: int
    value: Parcel | None
    """The cell's value; None if the cell does not end with an expression, or its value is None."""
    kept: dict[str, str] = field(default_factory=dict)
    """The names of `--keep` that the cell really defined on this rank, and the name of each value's type."""
    began_at_s: float | None = None
    """Beginning of the cell, on the clock of `at_s`."""
    at_s: float = 0.0
    exited_early: bool = False
    """Whether the cell called `sys.exit()` or `sys.exit(0)`."""
    sharded: tuple[str, ...] = ()
    """The names among `kept` whose values are sharded over the ranks."""
    sequence: int = -1
    """Number of collectives that the strategy's group has seen on this rank; ranks that differ need a new group. -1: no
    group."""


@message
class Failed:
    """A rank raised an exception."""

    run: str
    rank: int
    failure: Failure
    at_s: float
    settles: bool = False
    """Whether the rank waits for its device before it is ready again: `DeviceDrained` follows, or its end."""


@message
class Interrupted:
    """A rank stopped because it was asked to; its process and kept values live on."""

    run: str
    rank: int
    frames: tuple[Frame, ...]
    """The frames at which it was interrupted."""
    at_s: float
    settles: bool = False
    """Whether the rank waits for its device, as in `Failed`."""


@message
class Exited:
    """A rank's process ended during a run."""

    run: str
    rank: int
    pid: int
    exit_code: int | None
    """Exit code as `waitpid` returns it: the status, or minus the signal's number; None if unknown."""
    asked: bool
    """Whether we killed it: a stop was asked for, another rank had failed first, or the `reason` holds."""
    reason: str = ""
    """Reason why the whole run had to end with its ranks: `its ranks were stopped`; empty if it ended for another
    cause."""
    last_lines: tuple[str, ...] = ()
    """The end of its standard error (and of the crash report for a fatal signal)."""
    frames: tuple[Frame, ...] = ()
    """Frames at which a fatal signal came, as far as the crash report shows."""
    loading: str = ""
    """Variable of the notebook that it was unpickling; empty if it had finished with that."""
    out_of_memory: bool = False
    """Whether the system's own counter says that its out-of-memory killer was at work."""
    memory_limit_bytes: int = 0
    """Limit on all processes of its control group together; 0: there is none, or it had no effect."""
    peak_rss_bytes: int = 0
    at_s: float = 0.0


@message
class TimedOut:
    """The run was given `limit_s` and is being stopped because it took longer; `Interrupted` or `Exited` follow."""

    run: str
    limit_s: float
    at_s: float
    stalled: bool = False
    """Whether the limit is that for a stall; the last `Stalled` describes it."""


@message
class Ended:
    """Every rank of the run has ended and all its output was read. The last event of a run."""

    run: str
    at_s: float
    log_directory: str = ""
    """The folder of the ranks' logs; empty if no rank wrote anything."""
    clean: bool = True
    """Whether the groups of these ranks are fit for another run."""
    sequences: tuple[int, ...] = ()
    """The numbers of `Returned.sequence`: those that differ between ranks need a new group too."""


@message
class Answered:
    question: int
    status: ServerStatus


@message
class Attached:
    """The description of a detached run; its events follow."""

    run: str
    label: str
    ranks: tuple[int, ...]
    workers: tuple[WorkerInfo, ...] = ()
    """The ranks of the worker group, as they were when the run began."""
    world_size: int
    gpus: bool
    strategy: str
    started_wall_s: float
    """Seconds since 1970."""
    elapsed_s: float


@message
class NotAttached:
    run: str
    reason: str
