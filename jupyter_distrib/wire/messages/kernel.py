"""Messages between a kernel and the agent or coordinator that serves it: worker groups, and the beginning and stop of
runs. The events of a run are in `run_events.py`.

The coordinator forwards most messages to agents unchanged, and agents forward cells to ranks.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING

from jupyter_distrib.wire.messages.shared import (
    Cell,
    Command,
    Event,
    Packages,
    Parcel,
    Setting,
    Setup,
    WorkerInfo,
    message,
)

if TYPE_CHECKING:
    from jupyter_distrib.wire.messages.status import ServerStatus

DEFAULT_CPU_RANKS = 2
"""Default size of a worker group without GPUs."""


def number_of_ranks(asked: int, gpus: int | None) -> int:
    """Return the size of a worker group.

    Args:
        asked: The requested number; 0 for the default.
        gpus: The number of GPUs that its ranks can have: with the default, that many ranks, or `DEFAULT_CPU_RANKS` if
            it is 0. None if it is not known yet: then the size is not known either, and 0 is returned.
    """
    return asked or (0 if gpus is None else gpus or DEFAULT_CPU_RANKS)


KILL_AFTER_S = 2.0
"""Seconds after `Stop` at which a rank is killed."""


@message
class Hello(Command):
    """The first frame on every link from a kernel. The agent answers `Welcomed` or closes the link."""

    protocol: int
    session: str
    """Random name of this kernel's session with the extension; the prefix of its run ids."""
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
    pid_namespace: str = ""
    """The PID namespace of the kernel; empty: that of the agent."""


@message
class OpenWorkerGroup(Command):
    """Start `size` workers on this node. Answered by `WorkerGroupOpened` or `WorkerGroupRefused`."""

    group: str
    size: int
    """Ranks on this node; 0: one for each visible GPU, or 2 CPU ranks on a node without any."""
    least: int = 0
    """Minimum number of ranks, if fewer than `size` will do; 0: exactly `size`."""
    unit: int = 1
    """Number of which any such number of ranks is a multiple."""
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
    """Environment variables that are read at program start (`LD_*`, `PYTHON*`, `OMP_*`, ...): if there are any, the
    ranks are exec'd instead of forked."""
    visible: tuple[str, ...] | None = None
    """The kernel's CUDA_VISIBLE_DEVICES, split; None if unset."""
    gpu_type: str = ""
    """Text that the names of the GPUs must contain, ignoring case: `A10`."""
    wait_s: float = 0.0
    """Seconds to wait for resources that others hold, as reported by `WorkerGroupQueued`. 0: refuse at once."""
    packages: Packages | None = None
    """Packages that the ranks' Python must have; None if they are not compared."""

    def ranks(self, gpus: int | None = None) -> int:
        """Return the number of ranks, where there are `gpus` GPUs for them; see `number_of_ranks`."""
        return number_of_ranks(self.size, gpus if self.gpus else 0)


@message
class Execute(Command):
    """Run a cell on the given ranks of a worker group; the agent forwards it to each worker."""

    run: str
    group: str
    ranks: tuple[int, ...]
    cell: Cell
    inputs: Parcel
    setting: Setting
    setups: tuple[Setup, ...] = ()
    """The notebook's set-ups; a rank first runs the set-ups that it has not run yet."""
    run_size: int = 0
    """Number of ranks of the run on all nodes, if `ranks` are only those of one node; 0: there is no coordinator."""
    detached: bool = False
    notify: str = field(default="", repr=False)
    """The command or webhook for the news that a detached run has ended; empty for none."""
    notify_after_s: float = 0.0
    """Minimum duration of the run for this notification."""
    timeout_s: float | None = None
    """Seconds after which the agent stops the run and reports it with `TimedOut`."""
    hang_timeout_s: float | None = None
    """Seconds for which ranks may wait in one place for others before the agent stops the run."""
    label: str = ""
    """The run's name in lists: `Cell In[5]`."""
    trackers: tuple[str, ...] = ()
    """The experiment trackers that record the run, for kernels that attach later."""
    measures_peak: bool = False
    """Whether ranks measure the peak memory of their tensors, which resets torch's own peak: a dry run has predicted
    one."""
    max_restarts: int = 0
    """Maximum number of restarts after the loss of a rank, see `Restarted`."""
    restart_on_error: bool = False
    """Whether an exception on a rank also causes a restart."""
    min_ranks: int = 0
    """Minimum number of ranks with which it may continue if lost ones cannot be replaced, see `RanksReduced`; 0: all of
    them."""
    most_ranks: int = 0
    """Number of ranks up to which the run grows, see `Restarted.ranks`; 0: it does not grow."""
    rank_unit: int = 1
    """Number of which any other number of ranks is a multiple."""
    grow_after_s: float = 0.0
    """Minimum seconds between two changes to more ranks."""
    attempt: int = 0
    """Number of times that the run was started again so far."""
    profile: int = 0
    """Number of steps that torch's profiler records, see `Profiled`; 0: none."""
    unanswered: str = ""
    """Reason why a debugger's prompt cannot be answered while the cell runs; empty if it can."""


@message
class Stop(Command):
    """Stop a run: interrupt, cut its collectives, and kill what does not end. Safe to send at any time, any number of
    times."""

    run: str
    force: bool = False
    """Whether to kill at once (the second press of the button)."""


@message
class AskStacks(Command):
    """Report where each rank of a run is now. Answered by a `StackSeen` of every rank that still executes the cell."""

    run: str


@message
class Forget(Command):
    """Drop kept values."""

    group: str
    keys: tuple[str, ...]


@message
class CloseWorkerGroup(Command):
    """End a worker group's workers and their children, and give its devices back. A run on them ends with them."""

    group: str
    reason: str = ""
    """Reason, shown to everyone waiting for that run."""
    force: bool = False
    """Whether to kill the workers at once, instead of giving exit handlers a second."""


@message
class Ask(Command):
    """Ask for the status of the pool. Answered by `Answered` with the same `question`."""

    question: int


@message
class Attach(Command):
    """Send a detached run's whole record again, then its events as they come. Answered by `Attached` or
    `NotAttached`."""

    run: str
    """The run's id; empty for the newest detached run."""


@message
class Welcomed(Event):
    pid: int
    python: str
    torch: str
    cloudpickle: str
    pid_namespace: str = ""
    """The PID namespace of this process; empty: that of the kernel."""


@message
class NotServed(Event):
    """The first and last message of a server that cannot serve this kernel: it closes the link."""

    reason: str


@message
class Leaving(Event):
    """The coordinator accepts no more worker groups, because it cannot reach the cluster: the next one goes to its
    successor."""


@message
class WorkerGroupOpened(Event):
    group: str
    workers: tuple[WorkerInfo, ...]
    gpus: bool
    """Whether each of these ranks has a GPU."""
    node_has_gpus: bool | None = None
    """Whether the kernel's CUDA_VISIBLE_DEVICES admits any GPU, even if these ranks have none; None if unknown."""
    gpu_problem: str = ""
    """Sentence for the user on why GPUs of the node cannot be used; empty if there is no problem."""
    notes: tuple[str, ...] = ()
    """Sentences for the head of the first run: the choice of GPUs, and their use by others."""
    package_folders: tuple[str, ...] = ()
    """The folders of packages that these ranks import from; empty if they are on several nodes."""


@message
class WorkerGroupRefused(Event):
    """No worker of this worker group was started, or all were ended again."""

    group: str
    reason: str
    """Sentence for the user: what is missing or who holds it, and what to do."""


@message
class WorkerGroupQueued(Event):
    """The worker group is waiting, as the user allowed; sent again when the reason changes."""

    group: str
    reason: str
    """Sentence for the user, as in `WorkerGroupRefused`."""


@message
class WorkerGroupStarting(Event):
    """The ranks of a worker group are still starting; sent from time to time."""

    group: str
    up: int
    """The number of ranks that are ready."""
    size: int
    waits_for: str = ""
    """Reason why the other ranks are waiting, if known: `the import of torch`."""


@message
class WorkerGroupClosed(Event):
    """The worker group is gone: closed on request, or (with a reason) taken away, for example for another notebook."""

    group: str
    reason: str = ""


@message
class WorkerGroupChanged(Event):
    """A rank of an idle worker group was replaced: values kept on it are gone."""

    group: str
    workers: tuple[WorkerInfo, ...]
    lost: tuple[int, ...]


@message
class Answered(Event):
    question: int
    status: ServerStatus


@message
class Attached(Event):
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
    trackers: tuple[str, ...] = ()
    """The run's experiment trackers that no other kernel writes to any more, so that this kernel may."""


@message
class NotAttached(Event):
    run: str
    reason: str
