"""The interface between a rank's process and the library that its cells compute with, such as torch. A strategy names
its framework.

Everything else in `worker/` uses only this interface. The forkserver holds torch, and its ranks are forks of it; ranks
of any other framework are programs of their own, in which torch is never imported unless the cell does.

    load -> set_up -> (prepare, cell, finish) ... -> reset
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from jupyter_distrib.system.data_class import data_class
from jupyter_distrib.wire import messages as m

TORCH = "jupyter_distrib.worker.pytorch.pytorch:PyTorch"
"""The framework of strategies that do not name one."""
VARIABLE = "JUPYTER_DISTRIB_FRAMEWORK"
"""Environment variable that names the framework if a strategy needs another than torch; its ranks are started
afresh."""


@data_class
class DeviceState:
    """The state of a device and its pending work."""

    drained: bool = True
    """Whether it has finished its work; if not, it may be waiting for another rank, or for ever."""
    error: str = ""
    """Reason why this process can no longer use the device; empty if it can."""


class Groups(Protocol):
    """The process groups of this rank, and its connections to the other ranks."""

    apart: bool
    """Whether this rank is, or is about to be, disconnected from the others in this run."""
    ends_at_reset: bool
    """Whether `reset` may raise `RuntimeError`, so that the rank exits and is replaced, for which the next cell
    waits."""

    def reset(self, host: str, port: int, listen_fd: int) -> None:
        """Drop all groups, and meet at this address from now on, where rank 0 serves on the listening socket."""

    def environment(self) -> dict[str, str]:
        """Return the variables for programs that meet at the address, with the reserved port after that of `reset`."""

    def begin(self, run: str) -> None:
        """Prepare for a cell, before it can read whether there is a group."""

    def arrived(self) -> None:
        """Record that this rank has met the others as far as its strategy needs it, and begins the cell's own code."""

    def wait_for_arrivals(self, *, until: Callable[[], bool]) -> None:
        """Wait until all ranks have arrived, for a rank that leaves the cell early and whose connections are then cut;
        no longer than until `until` returns True."""

    def wait_endlessly(self, *, on: bool) -> None:
        """Wait for other ranks without a timeout in this cell, also in groups that it creates, since one of them may
        stop in the debugger. With `on` False, restore the timeouts."""

    def timeout_s(self) -> float | None:
        """Return the timeout in seconds of waiting for other ranks in a group; None without a group."""

    def tidy(self) -> None:
        """Between runs, remove the messages that ranks have exchanged."""

    def exchange(self, text: str) -> tuple[str, ...]:
        """Return the texts of all ranks, by rank. Called on all ranks of the worker group; waits for them."""

    def sequence(self) -> int:
        """Return the number of collectives in the group; if ranks differ, their collectives would not match. -1: no
        group."""

    def abort(self, then: Callable[[], None]) -> None:
        """Release a rank for which shutting down its sockets is not enough; call `then` when done, or after a while.
        Called in the control thread, which does not wait."""

    def wait_s(self) -> float:
        """Return the seconds for which a device may wait for other ranks before it counts as stuck."""

    def can_stay(self) -> bool:
        """Return whether the groups stay usable after a run that did not end well, if all ranks are at the same point.
        Called only in ranks with a device."""

    def keep(self) -> None:
        """Keep the groups after such a run, although kept values may differ between ranks. Called on all ranks."""


class Sightings(Protocol):
    """The progress of the groups of this process, for the control thread."""

    communication: tuple[str, ...]
    """Suffixes of the names of the source files that communicate."""

    def begin(self) -> None:
        """Start counting collectives, at the beginning of a cell."""

    def counts(self) -> Sequence[int]:
        """Return counts that change with every collective (fast)."""

    def inspect_groups(self) -> tuple[m.GroupSighting, ...]:
        """Return the state of each group (may take tens of milliseconds)."""


class Profiler(Protocol):
    """The profiler of one cell (`--profile`)."""

    def begin(self) -> None:
        """Start profiling when the cell begins."""

    def end(self, *, stopped: bool) -> None:
        """Stop when the cell ends. `stopped`: the rank has two seconds until it is killed."""


class Framework(Protocol):
    """A library in a rank's process. Methods are called in the rank's main thread unless stated otherwise."""

    name: str
    """Import path of its class: `package.module:Class`."""
    groups: Groups
    """The groups of this rank; set by `set_up`."""
    sightings: Sightings

    def load(self) -> None:
        """Import the modules that every rank needs, and install the replacements that all ranks share; in the
        forkserver, or at the start of a rank's own program."""

    def preload(self) -> Iterator[None]:
        """Import what cells will need, one library after another: all at once in the preloaded forkserver, one at a
        time in an idle rank that was forked before the preloaded forkserver was ready."""

    def set_up(self, order: m.WorkerOrder) -> None:
        """Set this process up as the rank: finish the set-up that a fork leaves open."""

    def prepare(self) -> None:
        """Restore state of the library that an interrupt of an earlier cell may have left inconsistent."""

    def finish(self, values: Iterable[object]) -> None:
        """End the workers of a cell's values that are not kept. Called when the notebook has its result."""

    def device(self, name: str) -> Any:
        """Return the rank's device as an object of the library."""

    def use_device(self) -> None:
        """Make the rank's device the current one of the calling thread. For all our threads that use the framework."""

    def drain(self, limit_s: float) -> DeviceState:
        """Wait for the device, but no longer than this limit."""

    def device_memory(self) -> tuple[int, int] | None:
        """Return the bytes allocated for tensors on the device, and the bytes reserved by the allocator; None if
        unknown. Called in the control thread."""

    def measure_peak(self) -> None:
        """Begin to measure the peak memory of tensors on the device."""

    def peak_bytes(self) -> int | None:
        """Return that peak; None if unknown."""

    def phase_times(self) -> m.PhaseTimes | None:
        """Return the cell's training time by phase; None if it does not train or this is not measured. From any
        thread."""

    def profiler(self, command: m.Execute, send: Callable[[m.Profiled], None]) -> Profiler | None:
        """Return the profiler of a cell, which sends its part of the trace; None if the framework has no profiler."""

    def is_of_device(self, error: BaseException) -> bool:
        """Return whether an exception may come from a broken device."""

    def tensor_bytes(self, value: object) -> int:
        """Return the memory of the tensors in a value on this rank, as far as they can be found cheaply."""

    def warm_device(self) -> None:
        """Load the libraries that the first computation on the device needs. Called once, while a rank is idle
        before its first cell."""

    def release_memory(self) -> None:
        """Return device memory that the framework caches without using it. Called when a rank is idle."""

    def use_threads(self, count: int) -> None:
        """Use this many threads per operation from now on; often called with the current number."""


def load(name: str = "") -> Framework:
    """Load a framework (`package.module:Class`) into this process; without a name, the one named by `VARIABLE`."""
    global current
    module, _, attribute = (name or os.environ.get(VARIABLE) or TORCH).partition(":")
    found: Framework = getattr(importlib.import_module(module), attribute)()
    found.load()
    current = found
    return found


current: Framework | None = None
"""The framework of this process; None in a process that neither is a rank nor starts any."""
