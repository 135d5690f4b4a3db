"""The interface of a rank's process to the library that its cells compute with: torch, today. A strategy names its
framework.

Everything else in `worker/` uses only this interface. The forkserver holds torch, and its ranks are forks of it; ranks
of any other framework are programs of their own, in which torch is never imported unless the cell does.

    load -> settle -> (prepare, cell, finish) ... -> reset
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from jupyter_distrib.system.data_class import data_class
from jupyter_distrib.wire import messages as m

TORCH = "jupyter_distrib.worker.pytorch.pytorch:PyTorch"
"""The framework of strategies that name no framework."""
VARIABLE = "JUPYTER_DISTRIB_FRAMEWORK"
"""The variable that names the framework for ranks whose strategy needs another one; such ranks are started anew."""


@data_class
class DeviceState:
    """The progress of a device with its work."""

    drained: bool = True
    """Whether it has finished its work. False: it may wait for another rank, or for ever."""
    error: str = ""
    """The reason why this process can no longer use it; empty if it can."""


class Groups(Protocol):
    """The process groups of this rank, and its connections to the other ranks."""

    apart: bool
    """Whether this rank is cut off from the others in this run, or will be in a moment."""
    ends_at_reset: bool
    """Whether `reset` may raise `RuntimeError` by which the rank ends and is replaced; the next cell then waits."""

    def reset(self, host: str, port: int, listen_fd: int) -> None:
        """Drop all groups. From now on ranks meet at this address, at which rank 0 serves with the listening socket."""

    def environment(self) -> dict[str, str]:
        """Return the variables for programs that meet at the address: with the port after that of `reset`, which is
        free."""

    def begin(self, run: str) -> None:
        """Prepare for a cell, before it can read whether there is a group."""

    def arrived(self) -> None:
        """Record that this rank has met the others as far as its strategy needs it, and begins the cell's own code."""

    def wait_for_arrivals(self, *, until: Callable[[], bool]) -> None:
        """Wait until all ranks have arrived, for a rank that leaves the cell early and whose connections are then cut;
        no longer than until `until` returns True."""

    def wait_endlessly(self, *, on: bool) -> None:
        """Wait for other ranks without a limit in this cell, also in groups that it makes: one of them may stop in the
        debugger. With `on` False, the cell is over."""

    def timeout_s(self) -> float | None:
        """Return the seconds after which a rank gives up waiting for others in a group; None without a group."""

    def tidy(self) -> None:
        """Remove, between runs, the messages that ranks have exchanged."""

    def exchange(self, text: str) -> tuple[str, ...]:
        """Return the texts of all ranks, by rank. All ranks of the worker group call it; it waits for them."""

    def sequence(self) -> int:
        """Return the number of collectives in the group; ranks that differ cannot meet. -1: no group."""

    def abort(self, then: Callable[[], None]) -> None:
        """Free a rank that cut sockets do not free; call `then` when that is done, or after a while. Called in the
        control thread, which does not wait for it."""

    def wait_s(self) -> float:
        """Return the seconds that a device may wait for other ranks before that counts as for ever."""

    def can_stay(self) -> bool:
        """Return whether the next run can use the groups after a run that did not end well, if all ranks are at the
        same point. Called only in ranks with a device."""

    def keep(self) -> None:
        """Keep the groups after such a run; kept values may differ between ranks. All ranks do so."""


class Sightings(Protocol):
    """The progress of the groups of this process, for the control thread."""

    communication: tuple[str, ...]
    """The ends of the names of the files in which a rank communicates."""

    def begin(self) -> None:
        """Count collectives from now on, at the beginning of a cell."""

    def counts(self) -> Sequence[int]:
        """Return counts that change with every collective; fast."""

    def look(self) -> tuple[m.GroupSighting, ...]:
        """Return the state of each group; may take tens of milliseconds."""


class Profiler(Protocol):
    """The profiler of one cell (`--profile`)."""

    def begin(self) -> None:
        """Begin with the cell."""

    def end(self, *, stopped: bool) -> None:
        """End with the cell. `stopped`: the rank has two seconds until it is killed."""


class Framework(Protocol):
    """A library in the process of a rank. Methods are called in the rank's main thread unless they say otherwise."""

    name: str
    """The place of its class: `package.module:Class`."""
    groups: Groups
    """The groups of this rank; set by `settle`."""
    sightings: Sightings

    def load(self) -> None:
        """Import the modules that every rank needs, and replace what all ranks replace alike; in the forkserver, or at
        the start of a rank's own program."""

    def preload(self) -> None:
        """Import what cells will need, in the preloaded forkserver; used only by the framework whose ranks are
        forked."""

    def settle(self, order: m.WorkerOrder) -> None:
        """Make this process the rank: complete the steps that a fork leaves open, and take the device."""

    def prepare(self) -> None:
        """Restore states of the library that an interrupt of an earlier cell may have left half changed."""

    def finish(self, values: Iterable[object]) -> None:
        """End the workers of a cell's values that are not kept. Called when the notebook has its answer."""

    def device(self, name: str) -> Any:
        """Return the rank's device as an object of the library."""

    def take_device(self) -> None:
        """Make the rank's device the current one of the calling thread. For all our threads that use the framework."""

    def drain(self, limit_s: float) -> DeviceState:
        """Wait for the device, but no longer than this limit."""

    def device_memory(self) -> tuple[int, int] | None:
        """Return the bytes of tensors on the device, and the bytes that the allocator holds for them; None if unknown.
        Called in the control thread."""

    def phase_times(self) -> m.PhaseTimes | None:
        """Return the time of the cell's training by phase; None if it does not train, or that is not measured. From any
        thread."""

    def profiler(self, command: m.Execute, send: Callable[[m.Profiled], None]) -> Profiler | None:
        """Return the profiler of a cell, which sends its part of the trace; None if the framework has no profiler."""

    def is_of_device(self, error: BaseException) -> bool:
        """Return whether an exception may come from a broken device."""

    def tensor_bytes(self, value: object) -> int:
        """Return the memory of the tensors in a value on this rank, as far as they can be found without cost."""

    def warm_device(self) -> None:
        """Load what the first computation on the device would load. Called once, when a rank is idle before its first
        cell."""

    def release_memory(self) -> None:
        """Give back the device's memory that the framework holds and does not use. Called when a rank is idle."""

    def use_threads(self, count: int) -> None:
        """Use this many threads for one operation from now on; often called with the present number."""


def load(name: str = "") -> Framework:
    """Load a framework, `package.module:Class`, for this process; without a name, the one that `VARIABLE` names."""
    global current
    module, _, attribute = (name or os.environ.get(VARIABLE) or TORCH).partition(":")
    found: Framework = getattr(importlib.import_module(module), attribute)()
    found.load()
    current = found
    return found


current: Framework | None = None
"""The framework of this process; None in a process that is no rank and starts none."""
