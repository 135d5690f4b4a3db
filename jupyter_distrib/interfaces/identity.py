"""The identity of this process: rank, world size, device. Set once when the worker starts; read by strategies and by
the cell. Also the state of the cell that the process executes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from jupyter_distrib.interfaces import framework
from jupyter_distrib.libraries import known
from jupyter_distrib.wire import messages as m

_order: m.WorkerOrder | None = None


@dataclass(slots=True)
class CellState:
    """State of the cell that this process executes, or executed last."""

    attempt: int = 0
    """Number of times that the run was started again so far (`--max-restarts`, or with more ranks)."""
    max_restarts: int = 0
    begun: bool = False
    """Whether its own code has begun, so that its names are not the notebook's any more."""
    strategy: Any = None
    """The strategy of the run, until the cell's names are dropped."""
    reporter: Any = None
    """The `Reporter` of metrics and progress while the cell runs."""
    displayer: Any = None
    """The `Displayer` while the cell runs."""


cell = CellState()


def assume(order: m.WorkerOrder) -> None:
    global _order
    _order = order


@contextmanager
def assumed(order: m.WorkerOrder) -> Iterator[None]:
    """Use a rank's identity inside the block, in a process that is not a rank (the inline pool)."""
    global _order, cell
    before = _order, cell
    _order, cell = order, CellState()
    try:
        yield
    finally:
        _order, cell = before


def order() -> m.WorkerOrder:
    assert _order is not None, "asked outside a rank"
    return _order


def rank() -> int:
    return order().rank


def world_size() -> int:
    return order().world_size


def several_nodes() -> bool:
    """Return whether the ranks of this worker group are on more than one node."""
    return world_size() > order().local_world_size


def everyone(command: m.Execute) -> bool:
    """Return whether all ranks execute this cell, including ranks on other nodes."""
    return (command.run_size or len(command.ranks)) == world_size()


def device() -> Any:
    """Return the device of this rank as an object of its framework: a `torch.device`. In the inline pool, which has no
    framework of its own, it is the name if torch is not loaded."""
    if framework.current is not None:
        return framework.current.device(order().device)
    torch = sys.modules.get("torch")
    return order().device if torch is None else torch.device(order().device)


def environment() -> dict[str, str]:
    """Return the variables that torchrun sets (docs.pytorch.org/docs/stable/elastic/run.html), and variables that keep
    libraries from launching ranks (Lightning reads TORCHELASTIC_RUN_ID) or from using an accelerator."""
    me = order()
    out = {
        "RANK": me.rank,
        "LOCAL_RANK": me.local_rank,
        "WORLD_SIZE": me.world_size,
        "LOCAL_WORLD_SIZE": me.local_world_size,
        "GROUP_RANK": me.node_rank,
        "NODE_RANK": me.node_rank,
        "GROUP_WORLD_SIZE": -(-me.world_size // me.local_world_size),
        "ROLE_RANK": me.rank,
        "ROLE_WORLD_SIZE": me.world_size,
        "ROLE_NAME": "default",
        "TORCHELASTIC_RUN_ID": me.group,
        "TORCHELASTIC_RESTART_COUNT": cell.attempt,
        "TORCHELASTIC_MAX_RESTARTS": cell.max_restarts,
        "JUPYTER_DISTRIB_GROUP": me.group,
        "JUPYTER_DISTRIB_WORKER": me.worker,
    }
    if me.agent:
        out["JUPYTER_DISTRIB_AGENT"] = me.agent
    out |= device_variables()
    if me.visible_devices is None:
        out |= known.cpu_environment()
    return {name: str(value) for name, value in out.items()}


def device_variables() -> dict[str, str]:
    """Return the variables that restrict this process to the devices of its node's ranks."""
    me = order()
    visible = me.visible_devices or ""
    if me.device.startswith("xpu"):
        cards = {"ZE_ENABLE_PCI_ID_DEVICE_ORDER": "1", "ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"}
        return {"CUDA_VISIBLE_DEVICES": "", "ZE_AFFINITY_MASK": visible, **cards}
    return {"CUDA_VISIBLE_DEVICES": visible} | ({} if me.visible_devices is None else _BUS_ORDER)


_BUS_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def with_defaults(given: dict[str, str]) -> dict[str, str]:
    """Return the user's variables with defaults: threads share the cores, local ranks meet on the loopback interface,
    ranks of several nodes on the interface between them, and torch records fewer collectives than its default of 2000,
    which grow to 3 MB a rank (measured with torch 2.13). For GPU ranks, see `_NCCL`."""
    interface = order().interface
    out = {
        "OMP_NUM_THREADS": str(order().threads),
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": f"={interface}",  # exactly this interface: without the sign, eth1 means eth10, too
    }
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in given:  # the older name, which torch reads only if the new one is unset
        out["TORCH_FR_BUFFER_SIZE"] = "200"
    if order().visible_devices is not None:
        out |= {name: value for name, (value, older) in _NCCL.items() if older not in given}
    return out | given


_NCCL = {
    # An error of CUDA belongs to the cell, which reports it; torch's watchdog would end the process before.
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": ("0", ""),
    # Required by `_abort_process_group`: the watchdog neither aborts beside it nor ends the process.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": ("0", "NCCL_ASYNC_ERROR_HANDLING"),
    # Else a thread queries the store each second for as long as the group lives, and prints when the store is gone.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": ("0", ""),
}
"""Our defaults for NCCL groups, read when a group is made (ProcessGroupNCCL.cpp), each with its older name."""


def is_rank() -> bool:
    return _order is not None
