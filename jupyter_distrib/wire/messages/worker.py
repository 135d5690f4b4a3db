"""Messages between an agent and its forkserver and ranks."""

from __future__ import annotations

from jupyter_distrib.wire.messages.shared import Command, Event, GroupSighting, PhaseTimes, message, part


@part
class WorkerOrder:
    """The identity of a new worker; fixed for its life."""

    group: str
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
    gpu_addresses: tuple[str, ...] = ()
    """The addresses on the PCI bus of the GPUs of this node's ranks, by local rank; empty for one that is unknown."""
    threads: int = 1
    """Intra-op threads (cores / ranks of the node)."""
    agent: str = ""
    """Mark of the agent, also set in the environment, so that its processes can be found when it is gone. Empty: there
    is no agent."""
    interface: str = "lo"
    """Interface through which ranks reach one another: loopback, or for worker groups of several nodes the one that
    routes between them."""
    overlay: str = ""
    """Folder of packages that the notebook has and this Python lacks; empty if there is none."""


@message
class Fork(Command):
    """Agent to forkserver: fork one worker per rank. Answered by `Forked` or `ForkFailed`.

    The frame carries four descriptors for each worker: link, standard output, standard error, crash notes.
    """

    orders: tuple[WorkerOrder, ...]
    number: int = 0
    """Number of this order, which the answer repeats."""


@message
class Preload(Command):
    """Agent to forkserver: fork the preloaded forkserver, which then imports what an optimizer or FSDP needs."""


@message
class ResetGroups(Command):
    """Agent to worker: drop every process group that was made with the old store; the new one is at this address.

    For the worker group's rank 0 the frame carries the store's listening socket."""

    port: int
    host: str = "127.0.0.1"


@message
class KeepGroups(Command):
    """Agent to worker with a device: keep the process groups, although the last run failed, because all ranks got
    equally far and their devices have finished."""


@message
class ReplaceStreams(Command):
    """Agent to worker: replace the pipes, because processes of an earlier run that are not the rank's children still
    hold them. Answered by `StreamsReplaced`."""

    run: str


@message
class CutSockets(Command):
    """Agent to worker: shut down these connected sockets, so that a blocked collective returns."""

    run: str
    inodes: tuple[int, ...]
    stop: bool = True
    """Whether the run is being stopped; False: only the far ends have gone."""
    abort: bool = False
    """Whether groups whose collectives run on a device are aborted, even if there is no socket to shut down."""


@message
class Probe(Command):
    """Agent to worker: report the place of the main thread. Answered at once by `ProbeAnswer`, from the control thread.
    Coordinator to agent: probe all of the run's ranks deeply, since ranks of other nodes seem to wait."""

    run: str
    deep: bool = False
    """Whether to inspect the process groups in any case; else only if the main thread has not moved for a while."""


@message
class Leave(Command):
    """Agent to worker: run the exit handlers and end."""


@message
class StopPostponed(Event):
    """Worker to agent: the run is being stopped, and this rank is importing a library, which it completes first. Sent
    again and again until it has."""

    run: str
    rank: int


@message
class ProbeAnswer(Event):
    """Worker to agent: the place of its main thread."""

    run: str
    rank: int
    line: int | None
    """Line of the cell."""
    function: str
    """Function that runs at that line: the cell's function, or the library's that it has called: `load()`, `wait()
    (threading.py)`; empty for the cell's own level."""
    call: str
    """Function of `torch.distributed` being called: `all_reduce`; empty if none."""
    unmoved_s: float
    """Seconds for which it has been at exactly this place, with no collective in between."""
    idle_s: float
    """Seconds for which the main thread has used no processor time."""
    groups: tuple[GroupSighting, ...] | None
    """The process groups; None if they were not inspected."""
    tensor_bytes: int | None = None
    """Memory of its tensors on its device, as the framework's allocator counts; None without a device."""
    reserved_bytes: int | None = None
    """Memory that the allocator has reserved, tensors included."""
    times: PhaseTimes | None = None
    """Time of its training by phase; None if it does not train."""
    in_debugger: bool = False
    """Whether it is stopped in the debugger and waits for a line of input."""
    program: str = ""
    """Line of the program that the cell runs, by `%run` or runpy: `train.py, line 12`; empty if it runs none."""


@message
class Ready(Event):
    """Worker to agent: the worker is up and waits for commands."""

    rank: int
    pid: int
    early: bool = False
    """Whether it was forked before the forkserver had imported everything an optimizer or FSDP needs."""
    reports_reset: bool = False
    """Whether it sends `DeviceSettled` after each `ResetGroups` (or ends), although it has no device."""


@message
class DeviceSettled(Event):
    """Worker with a device to agent, after `ResetGroups`: the cell's remaining work on the device is done or aborted,
    and the worker is ready for the next cell."""

    rank: int


@message
class DeviceProgress(Event):
    """Worker with a device to agent, after a cell that failed: how far it got. `KeepGroups` or `ResetGroups`
    follows."""

    run: str
    rank: int
    finished: bool
    """Whether the device has finished all work of the cell, so that the groups stay usable."""
    sequence: int
    """Number of collectives, as in `Returned`."""


@message
class ForkserverReady(Event):
    """Forkserver to agent: torch is imported; it can fork from now on. `early` if a preloaded forkserver is still
    starting."""

    pid: int
    early: bool


@message
class Forked(Event):
    """Forkserver to agent: the pids of the forked workers, in the order asked for."""

    number: int
    pids: tuple[int, ...]


@message
class ForkFailed(Event):
    """Forkserver to agent: none of the order's workers was forked, or all of them were ended again."""

    number: int
    reason: str


@message
class StreamsReplaced(Event):
    """Worker to agent: processes started by the run's cell outlive it and keep the rank's pipes.

    The frame carries the read ends of the rank's new pipes: standard output, standard error.
    """

    run: str
