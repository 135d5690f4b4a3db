"""What crosses between kernel, agent and worker: commands (imperative) and events (past tense).

Plain data, no behaviour, standard library only; loaded in every process of the project. `wire/link.py` carries these
classes as JSON plus raw bytes, so a field may only be one of: `None`, `bool`, `int`, `float`, `str`, `bytes`, a tuple
of these, a `dict` with string keys, or another class of this file.

    kernel  --commands-->  agent  --commands-->  worker (one per rank)
    kernel  <---events---  agent  <---events---  worker

Times named `at_s` are the node's monotonic clock in seconds; they order the events of one node.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar, dataclass_transform

PROTOCOL = 5
"""Raised whenever a class below changes its fields; part of the agent's fingerprint."""
T = TypeVar("T")


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
def message(cls: type[T]) -> type[T]:
    """A dataclass of keywords that is not changed once it is made: type checkers see to that.

    All share how they are compared and shown. A class for which `dataclass` generates that, and what freezes it at run
    time, takes three times as long to make, and each process of the project begins with these sixty.
    """
    made: Any = dataclass(slots=True, kw_only=True, eq=False, repr=False, match_args=False)(cls)
    made.__eq__, made.__hash__, made.__repr__ = _is_equal, _hash, _shown
    return made  # type: ignore[no-any-return]


def _values(one: Any) -> tuple[object, ...]:
    return tuple([getattr(one, name) for name in one.__slots__])


def _is_equal(one: object, other: object) -> bool:
    return _values(one) == _values(other) if type(one) is type(other) else NotImplemented


def _hash(one: object) -> int:
    return hash(_values(one))


def _shown(one: Any) -> str:
    fields = ", ".join(f"{name}={getattr(one, name)!r}" for name in one.__slots__)
    return f"{type(one).__name__}({fields})"


# ---------------------------------------------------------------------------------------------------- shared pieces


@message
class Parcel:
    """Pickled bytes and where their out-of-band buffers are (pickle protocol 5)."""

    data: bytes
    """The pickle stream; empty if it is so long that it is the first of the buffers."""
    sizes: tuple[int, ...] = ()
    """Length of each buffer in bytes, in pickle order."""
    inline: tuple[bytes, ...] = ()
    """The buffers themselves when they are small; else empty, and the frame carries one file descriptor of shared
    memory in which they lie one after another, each at the next multiple of `payload.ALIGNMENT`."""


@message
class Frame:
    """One line of a traceback, outermost first; only frames of the user's code and of libraries they called."""

    filename: str
    line: int
    function: str
    text: str = ""
    """The source line, stripped, where the rank could read it; the kernel prefers its own copy."""
    first_column: int = -1
    last_column: int = -1
    """0-based columns of the failing expression in that line, -1 if unknown."""


@message
class Failure:
    """An exception on one rank, as data: readable whatever happens to the object itself."""

    type_name: str
    """Qualified name, without the module for builtins and `__main__`: `KeyError`, `torch.OutOfMemoryError`."""
    message: str
    """What `str(exception)` gave, or a sentence that says it failed."""
    frames: tuple[Frame, ...] = ()
    notes: tuple[str, ...] = ()
    parcel: Parcel | None = None
    """The exception object, for the kernel to raise as its own type; None if it cannot be pickled."""
    cause: Failure | None = None
    """What it was raised from (`__cause__`, or `__context__` unless suppressed)."""
    code: int | None = None
    """For `SystemExit`: the exit status the user asked for."""


@message
class Cell:
    """The program that every rank executes."""

    source: str
    """Python source, IPython syntax already translated, padded with empty lines so that its line numbers are those of
    the front end (the magic line is line 1)."""
    filename: str
    """How tracebacks name it: `Cell In[5]`."""
    absent: dict[str, str] = field(default_factory=dict)
    """Names that the notebook has or had, and in a sentence why the ranks do not: a `NameError` tells it."""


@message
class Setting:
    """The surroundings a rank takes over before it executes a cell."""

    env: dict[str, str] = field(default_factory=dict)
    """The kernel's whole environment plus `--env`; the rank's own variables (RANK, ...) are added by the worker."""
    directory: str = ""
    path: tuple[str, ...] = ()
    """`sys.path` of the kernel, notebook folder first."""
    own_libraries: bool = False
    """The ranks run under another interpreter than the kernel: its own library folders follow `path`."""
    own_environment: bool = False
    """The ranks run on another machine: `env` goes on top of that machine's own environment."""
    strategy: str = "none"
    strategy_options: dict[str, str] = field(default_factory=dict)
    keep: tuple[str, ...] = ()
    """Names of the cell's namespace that stay on the rank."""
    by_value: bool = False
    """True for detached runs: values must be readable by another kernel, so nothing is sent as a reference."""


@message
class WorkerInfo:
    """One rank of a crew, as the agent knows it."""

    rank: int
    pid: int
    device: str
    """`cpu`, `cuda:0` (as the rank itself names it) or `mps`."""
    device_name: str = ""
    """`NVIDIA H200 (GPU 3)`; empty for CPU ranks."""
    state: str = "idle"
    """`starting`, `idle`, `running` or `gone`."""
    rss_bytes: int = 0
    node: str = ""
    """The machine that it is on, by the name or address that its pool knows it by; empty if there is only one."""


@message
class WorkerOrder:
    """Who a new worker is; fixed for its life."""

    crew: str
    worker: str
    """Unique name of the process, put into its environment so that everything it starts can be found and ended."""
    agent_pid: int
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int = 0
    device: str = "cpu"
    visible_devices: str | None = None
    """CUDA_VISIBLE_DEVICES for the process; None for CPU ranks, which see no GPU."""
    threads: int = 1
    """Intra-op threads (cores / ranks of the node)."""
    agent: str = ""
    """The agent's mark; in the environment too, for when the agent itself is gone. Empty: there is no agent."""
    interface: str = "lo"
    """Through which ranks reach one another: loopback, or for crews of several nodes the one that routes between
    them."""


@message
class Place:
    """Where one rank is while nothing moves."""

    rank: int
    where: str
    """What it does there, in a few words: `waits in all_reduce #2`, `runs load()`, `is stopped (SIGSTOP)`."""
    line: int | None
    """Of the cell; None if it is not known, or the rank is in no line of the cell."""
    waiting: bool
    """It waits for other ranks, so it is not the one to look at."""


@message
class GroupLook:
    """How far one rank is in one process group, by torch's flight recorder."""

    name: str
    ranks: tuple[int, ...]
    """Its members, as numbers of the whole world."""
    entered: int
    """Number of the last collective that the rank has called in it, counted from 1 in each run."""
    number: int = 0
    """The first one that has not ended for this rank; 0: none."""
    op: str = ""
    """Its kind, `all_reduce`."""
    tensors: str = ""
    """Shapes and types of what it was given: `[4] Float`."""
    spins: bool = False
    """A thread that waits for it keeps its core busy (NCCL)."""


# ---------------------------------------------------------------------------------------------------- commands


@message
class Hello:
    """First frame on every link from a kernel. The agent answers `Welcomed` or closes the link."""

    protocol: int
    session: str
    """Random name of this kernel's use of the extension; run ids begin with it."""
    pid: int
    label: str
    """How other notebooks are told who holds something: `train.ipynb (kernel 4242)`."""
    notebook: str = ""
    """The notebook's path, the same after a restart of its kernel; empty if the front end does not tell."""
    python: str
    torch: str
    cloudpickle: str


@message
class OpenCrew:
    """Start `size` workers on this node. Answered by `CrewOpened` or `CrewRefused`."""

    crew: str
    size: int
    """Ranks on this node; 0: one for each visible GPU, or 2 CPU ranks on a node without any."""
    gpus: bool
    """True: one leased GPU per rank, or CPU ranks if the node has no GPU at all. False: CPU ranks."""
    first_rank: int = 0
    world_size: int = 0
    """0: the same as `size`."""
    node_rank: int = 0
    host: str = "127.0.0.1"
    """Where other nodes reach this one; rank 0's node binds the store to it."""
    interface: str = "lo"
    load_env: dict[str, str] = field(default_factory=dict)
    """Variables that are read when a program loads (`LD_*`, `PYTHON*`, `OMP_*`, ...): given any, the ranks are exec'd
    instead of forked from the template."""
    visible: tuple[str, ...] | None = None
    """The kernel's CUDA_VISIBLE_DEVICES, split; None if unset."""
    gpu_type: str = ""
    """Only GPUs with this in their name, in any case: `A10`."""
    wait_s: float = 0.0
    """How long to wait for what others hold; `CrewQueued` says what that is. 0: refuse at once."""


@message
class Execute:
    """Run a cell on the given ranks of a crew; also what the agent hands to each worker."""

    run: str
    crew: str
    ranks: tuple[int, ...]
    cell: Cell
    inputs: Parcel
    setting: Setting
    run_size: int = 0
    """Ranks of the run on all nodes, where `ranks` are those of one, and a gate looks after all; 0: there is none."""
    detached: bool = False
    timeout_s: float | None = None
    """The agent stops the run after this long and says so with `TimedOut`."""
    hang_timeout_s: float | None = None
    """The same when ranks have waited this long for others, in one and the same place."""
    label: str = ""
    """How the run is named in lists: `Cell In[5]`."""


KILL_AFTER_S = 2.0
"""After `Stop`."""


@message
class Stop:
    """Stop a run: interrupt, cut its collectives, and kill what does not end. Safe to send at any time, any number of
    times."""

    run: str
    force: bool = False
    """Kill at once (the second press of the button)."""


@message
class Forget:
    """Drop kept values."""

    crew: str
    keys: tuple[str, ...]


@message
class CloseCrew:
    """End a crew's workers, their children, and give its devices back. A run on them ends with them."""

    crew: str
    reason: str = ""
    """Why, for whoever waits for that run."""
    force: bool = False
    """Kill them, instead of giving exit handlers a second."""


@message
class Renew:
    """To the node of rank 0 of a crew that spans nodes: make a new store. Answered by `Regrouped`."""

    crew: str


@message
class Meet:
    """To the other nodes of such a crew: where its store is now."""

    crew: str
    host: str
    port: int


@message
class Part:
    """To the other nodes of such a crew: shut the connections whose far ends these are."""

    run: str
    ends: tuple[tuple[str, str], ...]
    """As in `Connected`."""


@message
class Ask:
    """Ask the agent for its state. Answered by `Answered` with the same `question`."""

    question: int


@message
class Attach:
    """Send a detached run's whole record again, then its events as they come. Answered by `Attached` or
    `NotAttached`."""

    run: str
    """Empty: the newest detached run."""


@message
class Fork:
    """Agent to template: fork one worker per rank. The frame carries four descriptors for each: its link, its standard
    output and its standard error. Answered by `Forked`."""

    orders: tuple[WorkerOrder, ...]


@message
class Grow:
    """Agent to template: fork the fuller one, which goes on to import what an optimizer or FSDP needs."""


@message
class Regroup:
    """Agent to worker: the store is a new one; drop every process group made with the old one.

    For the crew's rank 0 the frame carries the store's listening socket."""

    port: int
    host: str = "127.0.0.1"


@message
class Split:
    """Agent to worker: what an earlier run has left keeps the rank's pipes, and is not its child. Answered by
    `Parted`."""

    run: str


@message
class Cut:
    """Agent to worker: shut down these connected sockets, so that a blocked collective returns."""

    run: str
    inodes: tuple[int, ...]
    stop: bool = True
    """The run is being stopped; False: only its far ends have gone."""


@message
class Probe:
    """Agent to worker: where is the main thread? Answered at once by `Probed`, from the control thread. From the gate
    to an agent: have all of the run's ranks look deep, since ranks of other nodes seem to wait."""

    run: str
    deep: bool = False
    """Look into the process groups in any case; else only if the main thread has not moved for a while."""


@message
class Leave:
    """Agent to worker: run the exit handlers and end."""


# ---------------------------------------------------------------------------------------------------- events


@message
class Welcomed:
    pid: int
    python: str
    torch: str
    cloudpickle: str


@message
class Leaving:
    """Whoever holds the pool cannot reach it any more, and takes no more crews: the next one is for its successor."""


@message
class Probed:
    """Worker to agent: where its main thread is."""

    run: str
    rank: int
    line: int | None
    """Of the cell."""
    function: str
    """What runs at that line: the cell's function, or the library's that it has called: `load()`,
    `wait() (threading.py)`; empty for the cell's own level."""
    call: str
    """The function of `torch.distributed` that it is in: `all_reduce`; empty if it is in none."""
    unmoved_s: float
    """For so long it has been seen at exactly this place, with no collective in between."""
    idle_s: float
    """For so long the main thread has used no processor time."""
    groups: tuple[GroupLook, ...] | None
    """None if it has not looked."""


@message
class Look:
    """What an agent knows of one rank that executes a cell."""

    rank: int
    state: str
    """`running`, `stopped` by SIGSTOP, `traced` by a debugger, `silent` (C code does not let it answer), or `left`."""
    pid: int = 0
    seen: Probed | None = None
    """Its last answer."""
    line: int | None = None
    """Of a silent rank: where it is now."""


@message
class Looked:
    """Agent to gate, once a second: what it knows of its ranks of a run that may have others elsewhere."""

    run: str
    looks: tuple[Look, ...]


@message
class Ready:
    """Worker to agent: it is up and waits for commands."""

    rank: int
    pid: int
    early: bool = False
    """Forked before the template had imported everything an optimizer or FSDP needs."""


@message
class TemplateReady:
    """Template to agent: torch is imported; from now on it forks. `early` if a fuller one is still on its way."""

    pid: int
    early: bool


@message
class Forked:
    """Template to agent: the pids, in the order asked for."""

    pids: tuple[int, ...]


@message
class CrewOpened:
    crew: str
    workers: tuple[WorkerInfo, ...]
    gpus: bool
    """One GPU for each of these ranks."""
    node_has_gpus: bool = False
    """There are GPUs that the kernel's CUDA_VISIBLE_DEVICES lets through, whether or not these ranks have any."""


@message
class CrewRefused:
    """No worker of this crew was started, or all were ended again."""

    crew: str
    reason: str
    """A sentence for the user: what is missing or who holds it, and what to do."""


@message
class CrewQueued:
    """The crew waits, because it was asked to; sent again when the reason changes."""

    crew: str
    reason: str
    """As in `CrewRefused`."""


@message
class Regrouped:
    """Rank 0's node of a crew that spans nodes has a new store."""

    crew: str
    host: str
    port: int


@message
class Connected:
    """The run's ranks on one node of several are being stopped, or one has left; these are their connections whose far
    ends belong to processes of other agents."""

    run: str
    ends: tuple[tuple[str, str], ...]
    """Local and remote address of each, as /proc/net/tcp has them."""


@message
class CrewClosed:
    """The crew is gone: asked for, or (with a reason) taken away, for example for another notebook."""

    crew: str
    reason: str = ""


@message
class CrewChanged:
    """A rank of an idle crew was replaced: what was kept on it is gone."""

    crew: str
    workers: tuple[WorkerInfo, ...]
    lost: tuple[int, ...]


@message
class Started:
    """A rank begins to execute the cell."""

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
    """Decoded with replacement; ends anywhere, also inside a line."""
    skipped_lines: int = 0
    """Lines left out before `text` because there were too many to show; all of them are in the log."""
    at_s: float = 0.0


@message
class Parted:
    """Worker to agent: processes that the run's cell started go on after it and keep the rank's pipes.

    With it come the read ends of the rank's new ones: standard output, standard error.
    """

    run: str


@message
class Progressed:
    """A rank moved on in a loop that it reports with `jupyter_distrib.progress`."""

    run: str
    rank: int
    label: str
    step: int
    total: int | None
    """None if the loop has no known end."""
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
    """A sentence about a run or a rank that belongs in the view: `utils.py changed and was imported again`."""

    run: str
    rank: int | None
    text: str


@message
class Sampled:
    """What a rank's process and the children it started use; about once a second while a run is on, only then."""

    run: str
    rank: int
    rss_bytes: int
    cpu_percent: float
    """Since the sample before; 100 is one core."""
    gpu_memory_bytes: int | None
    """Used by this rank on its GPU; None for a CPU rank, and where the driver does not tell."""
    gpu_memory_total_bytes: int | None
    gpu_percent: float | None
    """How busy the whole GPU is."""
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
    """It takes the place of what this rank displayed under the same `display_id`, and is nothing new."""
    at_s: float


@message
class Cleared:
    """A rank called `clear_output`: what it displayed goes. What it wrote stays."""

    run: str
    rank: int
    at_s: float


@message
class Stalled:
    """Nothing moves any more, and why; until `Moved` or another `Stalled`. The run goes on."""

    run: str
    text: str
    """One or a few sentences: `rank 0 has not reached all_reduce #2; ranks 1-3 wait there (line 14)`."""
    places: tuple[Place, ...]
    at_s: float


@message
class Moved:
    """The stall is over."""

    run: str
    at_s: float


@message
class Returned:
    """A rank reached the end of the cell."""

    run: str
    rank: int
    value: Parcel | None
    """None: the cell does not end with an expression, or its value is None."""
    kept: dict[str, str] = field(default_factory=dict)
    """The names of `--keep` that the cell really defined on this rank, and the name of each value's type."""
    at_s: float = 0.0
    exited_early: bool = False
    """The cell called `sys.exit()` or `sys.exit(0)`."""
    sharded: tuple[str, ...] = ()
    """Those of the kept names whose values are sharded over the ranks."""
    sequence: int = -1
    """Collectives that the strategy's group has seen on this rank; ranks that differ need a new group. -1: no group."""
    started: Started | None = None
    """The beginning, if the cell was over before that was told."""


@message
class Failed:
    """A rank raised."""

    run: str
    rank: int
    failure: Failure
    at_s: float


@message
class Interrupted:
    """A rank stopped because it was asked to; its process and kept values live on."""

    run: str
    rank: int
    frames: tuple[Frame, ...]
    """Where it was."""
    at_s: float


@message
class Exited:
    """A rank's process ended during a run."""

    run: str
    rank: int
    pid: int
    exit_code: int | None
    """As `waitpid` tells it: the status, or minus the signal's number; None if it cannot be known."""
    asked: bool
    """True if we killed it, because a stop was asked for, another rank had failed first, or for the `reason`."""
    reason: str = ""
    """Why the whole run had to end with its ranks; empty if it was not for that: `its ranks were stopped`."""
    last_lines: tuple[str, ...] = ()
    """The end of what it wrote to standard error (and of the crash report for a fatal signal)."""
    frames: tuple[Frame, ...] = ()
    """Where it was when a fatal signal came, as far as the crash report tells."""
    loading: str = ""
    """The variable of the notebook that it was unpickling; empty if it was past that."""
    out_of_memory: bool = False
    """The system's own counter says that its out-of-memory killer was at work."""
    memory_limit_bytes: int = 0
    """What all processes of its control group together may use; 0: there is no limit, or it does not matter here."""
    peak_rss_bytes: int = 0
    at_s: float = 0.0


@message
class TimedOut:
    """The run was given `limit_s` and is being stopped because it took longer; `Interrupted` or `Exited` follow."""

    run: str
    limit_s: float
    at_s: float
    stalled: bool = False
    """The limit is that for a stall; the last `Stalled` says what it is."""


@message
class Ended:
    """Every rank of the run has ended and all its output was read. The last event of a run."""

    run: str
    at_s: float
    log_directory: str = ""
    """Where the ranks' logs are; empty if nobody wrote anything."""
    clean: bool = True
    """False: the groups of these ranks are not fit for another run."""
    sequences: tuple[int, ...] = ()
    """See `Returned.sequence`: those that differ between ranks need a new group too."""


@message
class Answered:
    question: int
    answer: dict[str, object]


@message
class Attached:
    """What the run is; its events follow."""

    run: str
    label: str
    ranks: tuple[int, ...]
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


Command = (
    Hello
    | OpenCrew
    | Execute
    | Stop
    | Forget
    | CloseCrew
    | Renew
    | Meet
    | Part
    | Ask
    | Attach
    | Fork
    | Grow
    | Regroup
    | Split
    | Cut
    | Probe
    | Leave
)
RunEvent = (
    Started
    | Wrote
    | Progressed
    | Measured
    | Noted
    | Sampled
    | Displayed
    | Cleared
    | Stalled
    | Moved
    | Returned
    | Failed
    | Interrupted
    | Exited
    | TimedOut
    | Ended
)
"""What a `RunRecord` folds."""
Event = (
    Welcomed
    | Leaving
    | TemplateReady
    | Forked
    | Ready
    | Parted
    | Probed
    | CrewOpened
    | CrewRefused
    | CrewQueued
    | Regrouped
    | Connected
    | Looked
    | CrewClosed
    | CrewChanged
    | RunEvent
    | Answered
    | Attached
    | NotAttached
)
Message = Command | Event
