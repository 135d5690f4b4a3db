"""What a rank's process needs of the library that its cells compute with: torch, today. A strategy names its framework.

Everything else in `worker/` knows this interface only. The forkserver holds torch, and its ranks are forks of it; ranks
of any other framework are programs of their own, in which torch is never imported unless the cell does.

    load -> settle -> (prepare, cell, finish) ... -> reset
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jupyter_distrib.wire.messages import GroupSighting, WorkerOrder

TORCH = "jupyter_distrib.worker.pytorch.pytorch:PyTorch"
"""The framework of strategies that name none."""
VARIABLE = "JUPYTER_DISTRIB_FRAMEWORK"
"""Names the framework in the environment of ranks whose strategy wants another one; such ranks are started anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceState:
    """The progress of a device with what it was given."""

    drained: bool = True
    """It has done everything. False: it may wait for another rank, or for ever."""
    error: str = ""
    """The reason why it is of no more use to this process; empty if it is."""


class Groups(Protocol):
    """The process groups of this rank, and its way to the other ranks."""

    apart: bool
    """In this run, this rank is cut off from the others, or will be in a moment."""

    def reset(self, host: str, port: int, listen_fd: int) -> None:
        """Forget all groups. From now on ranks meet at this address, where rank 0 serves with the listening socket."""

    def environment(self) -> dict[str, str]:
        """Return the variables that tell programs where to meet: at the port after that of `reset`, which is free."""

    def begin(self, run: str) -> None:
        """Prepare for a cell, before it finds out whether there is a group."""

    def tidy(self) -> None:
        """Clear away, between runs, what ranks have told one another."""

    def exchange(self, text: str) -> tuple[str, ...]:
        """Return what every rank has given, by rank. All ranks of the worker group call it; it waits for them."""

    def sequence(self) -> int:
        """Return how many collectives the group has seen; ranks that differ cannot meet. -1: no group."""

    def abort(self, then: Callable[[], None]) -> None:
        """Free a rank that is blocked where cut sockets do not free it; call `then` when that is done, or after a
        while. Called in the control thread, which does not wait for it."""

    def wait_s(self) -> float:
        """Return how long a device may wait for other ranks before that counts as for ever."""


class Sightings(Protocol):
    """The progress of the groups of this process, for the control thread."""

    communication: tuple[str, ...]
    """Ends of the names of the files in which a rank communicates."""

    def begin(self) -> None:
        """Count collectives from here, where a cell begins."""

    def counts(self) -> Sequence[int]:
        """Return something that changes with every collective; fast."""

    def look(self) -> tuple[GroupSighting, ...]:
        """Return the state of each group; may take tens of milliseconds."""


class Framework(Protocol):
    """One library, in the process of a rank. Methods are called in the rank's main thread unless they say otherwise."""

    name: str
    """Where it is: `package.module:Class`."""
    preloaded: tuple[str, ...]
    """Modules that the preloaded forkserver imports; of use only to the framework that ranks are forked with."""
    groups: Groups
    """There after `settle`."""
    sightings: Sightings

    def load(self) -> None:
        """Import what every rank needs; in the forkserver, or at the start of a rank's own program."""

    def settle(self, order: WorkerOrder) -> None:
        """Become this rank: complete what a fork leaves to be done, and take the device."""

    def prepare(self) -> None:
        """Undo what an earlier cell may have left in a state of the library that an interrupt has cut in two."""

    def finish(self, values: Iterable[object]) -> None:
        """End what a cell's values, which are not kept, have started. Called when the notebook has its answer."""

    def device(self, name: str) -> Any:
        """Return the rank's device as the library has it."""

    def take_device(self) -> None:
        """Make the rank's device that of the calling thread. For every thread of ours that asks the framework."""

    def drain(self, limit_s: float) -> DeviceState:
        """Wait for the device, no longer than this."""

    def is_of_device(self, error: BaseException) -> bool:
        """Return whether an exception may tell of a broken device."""

    def release_memory(self) -> None:
        """Give back what the framework holds of the device's memory and does not use. Called when a rank is idle."""

    def use_threads(self, count: int) -> None:
        """Use this many threads for one operation from now on; often called with the number that holds already."""


def load(name: str = "") -> Framework:
    """Have this process compute with a framework, `package.module:Class`; without a name, with that of `VARIABLE`."""
    global current
    module, _, attribute = (name or os.environ.get(VARIABLE) or TORCH).partition(":")
    found: Framework = getattr(importlib.import_module(module), attribute)()
    found.load()
    current = found
    return found


current: Framework | None = None
"""The framework of this process; None in one that is no rank and starts none."""
