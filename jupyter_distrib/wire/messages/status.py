"""The status of a pool: what the process that serves it tells of itself, of its nodes and of its worker groups.

The agent, the coordinator and the inline pool each build it in one place; `kernel/session/status.py` adds what the
kernel knows. A field that is added here is in what `%distributed_status` gives as JSON without another edit.
"""

from __future__ import annotations

from dataclasses import field

from jupyter_distrib.wire.messages.shared import WorkerInfo, part


@part
class NodeStatus:
    """One machine of a pool."""

    name: str
    """The machine, by the name or address that the pool uses."""
    cpus: float
    free_cpus: float | None = None
    """Processors that no job has; None if unknown, as is each free amount."""
    memory_bytes: int
    gpus: int = 0
    free_gpus: int | None = None
    gpu_type: str = ""
    """The names of its types of GPUs, with commas between them."""
    state: str = ""
    """Its state in a few words, if nobody can have ranks there now: `not reached`, `drained`."""
    holders: tuple[str, ...] = ()
    """The holders of parts of it, as far as its engine tells: `user ada: job 17, 4 CPUs`."""


@part
class GpuStatus:
    """One GPU of a node, or one slice of a GPU."""

    index: int
    number: str
    """The number that people see: `3`, or `3:1` for a slice."""
    name: str
    memory_bytes: int | None
    """Its memory; None if unknown."""
    used_bytes: int | None
    """The part of it that is in use; None if unknown."""
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
    """The name by which the kernel knows that the group is its own."""
    workers: tuple[WorkerInfo, ...]
    run: str = ""
    """The run that it executes; empty if it is idle."""
    label: str = ""
    """The label of that run: `Cell In[5]`."""
    kept: dict[str, float] = field(default_factory=dict)
    """Times (seconds since 1970) since which values live on its ranks, by key: `run/name`."""


@part
class WaitingStatus:
    """One worker group that has no ranks yet, since it waits for room."""

    holder: str
    """The label of the kernel."""
    ranks: int
    """The number of ranks that it asks for; 0 if that depends on what is free."""
    gpus: bool
    reason: str
    """The sentence on what it waits for."""


@part
class ServerStatus:
    """The process that serves a pool: an agent, a coordinator, or the kernel itself with an inline pool."""

    state: str
    """Its state in a few words: `forkserver ready`, `Ray at 10.0.0.7:6379`."""
    name: str = ""
    """The machine or cluster that it serves; empty if there is no more to it than the kernel's process."""
    nodes: tuple[NodeStatus, ...] | None = ()
    """The machines of the pool; None before it is known which there are."""
    gpus: tuple[GpuStatus, ...] = ()
    """The GPUs of its machine, each by itself; none if there are several machines."""
    gpu_problem: str = ""
    """Sentence on why GPUs of its machine cannot be used; empty if all is well."""
    pid: int = 0
    up_s: float = 0.0
    groups: tuple[GroupStatus, ...] = ()
    """The worker groups of all kernels that it serves."""
    waiting: tuple[WaitingStatus, ...] = ()
    """The worker groups that wait for room, in their order."""
    next_rank: str = ""
    """The way to the next rank, as the engine tells it: `at once, on node n1`; empty if its nodes tell."""
