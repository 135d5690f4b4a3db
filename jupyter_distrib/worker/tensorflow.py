"""TensorFlow as the framework of a rank, which is a separate program that never imports torch. Rank's main thread.

The strategy imports TensorFlow when a cell begins. TensorFlow keeps its cluster for the life of a process, so ranks
whose cluster has lost a member are replaced.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence

from jupyter_distrib.interfaces.framework import DeviceState
from jupyter_distrib.wire import messages as m
from jupyter_distrib.worker.address_exchange import PlainGroups

NAME = "jupyter_distrib.worker.tensorflow:TensorFlow"


class Cluster(PlainGroups):
    """The connections of this rank: those of this package, and the cluster that TensorFlow holds."""

    ends_at_reset = True
    config = ""
    """The value of `TF_CONFIG` for all cells of this process; empty before the first cell."""

    def reset(self, host: str, port: int, listen_fd: int) -> None:
        if self.config:
            raise RuntimeError("TensorFlow keeps its cluster for as long as a process lives.")
        super().reset(host, port, listen_fd)


class NoSightings:
    """The progress of TensorFlow's collectives, which it does not expose."""

    communication: tuple[str, ...] = ()

    def begin(self) -> None:
        """Do nothing."""

    def counts(self) -> Sequence[int]:
        return ()

    def inspect_groups(self) -> tuple[m.GroupSighting, ...]:
        return ()


class TensorFlow:
    """The framework TensorFlow; see `jupyter_distrib.interfaces.framework.Framework`."""

    name = NAME

    def load(self) -> None:
        """Do nothing, so that a cell without TensorFlow does not wait for its import."""

    def preload(self) -> Iterator[None]:
        yield from ()

    def set_up(self, order: m.WorkerOrder) -> None:
        self.sightings = NoSightings()
        self.groups = Cluster(order.rank, order.world_size)

    def prepare(self) -> None:
        """Do nothing: there is no state of TensorFlow to restore after an interrupt."""

    def finish(self, values: Iterable[object]) -> None:
        """Do nothing: TensorFlow's input pipelines have no processes."""

    def device(self, name: str) -> str:
        return name

    def use_device(self) -> None:
        """Do nothing: a process sees only its own device."""

    def drain(self, limit_s: float) -> DeviceState:
        """Return at once: TensorFlow waits for its device itself when a value is read."""
        return DeviceState()

    def device_memory(self) -> tuple[int, int] | None:
        return None

    def measure_peak(self) -> None:
        """Do nothing: no dry run plays TensorFlow."""

    def peak_bytes(self) -> int | None:
        return None

    def phase_times(self) -> m.PhaseTimes | None:
        return None

    def profiler(self, command: m.Execute, send: Callable[[m.Profiled], None]) -> None:
        return None

    def is_of_device(self, error: BaseException) -> bool:
        return "CUDA_ERROR" in str(error)

    def tensor_bytes(self, value: object) -> int:
        return 0

    def warm_device(self) -> None:
        pass

    def release_memory(self) -> None:
        """Do nothing: TensorFlow keeps the memory that it has allocated."""

    def use_threads(self, count: int) -> None:
        """Set the variables that TensorFlow reads once, at its first operation."""
        os.environ |= {"TF_NUM_INTRAOP_THREADS": str(count), "TF_NUM_INTEROP_THREADS": str(count)}
