"""The status of a pool: what its process reports about itself, its nodes and its worker groups.

The agent, the coordinator and the inline pool each build it in one place; `kernel/session/status.py` adds what the
kernel knows. A field added here appears in the JSON of `%distributed_status` without another edit.
"""

from __future__ import annotations

from dataclasses import field

from jupyter_distrib.wire.messages.shared import WorkerInfo, part


@part
class NodeStatus:
    """One machine of a pool."""

    name: str
    """The machine's name or address, as used by the pool."""
    cpus: float
    free_cpus: float | None = None
    """Free processors; None if unknown, as for each free amount."""
    memory_bytes: int
    gpus: int = 0
    free_gpus: int | None = None
    gpu_type: str = ""
    """The names of its GPU types, separated by commas."""
    state: str = ""
    """Its state in a few words, if it cannot run ranks now: `not reached`, `drained`."""
    holders: tuple[str, ...] = ()
    """Users of parts of the machine, as far as its engine reports them: `user ada: job 17, 4 CPUs`."""


@part
class GpuStatus:
    """One GPU of a node, or one slice of a GPU."""

    index: int
    number: str
    """The number shown to users: `3`, or `3:1` for a slice."""
    name: str
    memory_bytes: int | None
    """Its memory; None if unknown."""
    used_bytes: int | None
    """The memory in use; None if unknown."""
    holder: str
    """The notebook that has leased it; empty if it is free."""
    modes: str = ""
    """Its special modes: `exclusive process, MPS`; empty for most."""


@part
class GroupStatus:
    """One worker group of a kernel."""

    group: str
    holder: str
    """The label of the kernel: `train.ipynb (kernel 4242)`."""
    session: str
    """The kernel's session, by which it recognizes its own groups."""
    workers: tuple[WorkerInfo, ...]
    run: str = ""
    """The run that it executes; empty if it is idle."""
    label: str = ""
    """The label of that run: `Cell In[5]`."""
    began_at_s: float = 0.0
    """Start of that run in seconds since 1970; 0 if it is idle."""
    kept: dict[str, float] = field(default_factory=dict)
    """Creation time of each value kept on its ranks (seconds since 1970), by key: `run/name`."""


@part
class WaitingStatus:
    """One worker group that has no ranks yet and is waiting for room."""

    holder: str
    """The label of the kernel."""
    ranks: int
    """The number of requested ranks; 0 if that depends on what is free."""
    gpus: bool
    reason: str
    """A sentence on what it is waiting for."""


@part
class ServerStatus:
    """The process that serves a pool: an agent, a coordinator, or the kernel itself with an inline pool."""

    state: str
    """Its state in a few words: `forkserver ready`, `Ray at 10.0.0.7:6379`."""
    name: str = ""
    """The machine or cluster that it serves; empty if it is only the kernel's process."""
    nodes: tuple[NodeStatus, ...] | None = ()
    """The machines of the pool; None as long as they are unknown."""
    gpus: tuple[GpuStatus, ...] = ()
    """The GPUs of its machine; none if there are several machines."""
    gpu_problem: str = ""
    """Sentence on why GPUs of its machine cannot be used; empty if there is no problem."""
    pid: int = 0
    up_s: float = 0.0
    groups: tuple[GroupStatus, ...] = ()
    """The worker groups of all kernels that it serves."""
    waiting: tuple[WaitingStatus, ...] = ()
    """The worker groups that wait for room, in their order."""
    next_rank: str = ""
    """When and where the next rank could start, as the engine reports it: `at once, on node n1`; empty if the nodes
    show that."""
