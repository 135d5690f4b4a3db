"""The limits on what a worker group gets: how many ranks at most, and which GPUs, by leases (`devices.py`) that idle
worker groups yield if need be. Runs in the agent's loop."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from jupyter_distrib.agent import devices
from jupyter_distrib.agent.devices import Gpu
from jupyter_distrib.agent.worker_group import NodeWorkerGroup
from jupyter_distrib.system import formatting
from jupyter_distrib.wire.messages import WorkerGroupClosed

MAX_RANKS = 1000
FDS_PER_RANK = 6
"""Descriptors of a rank while it starts: both ends of its link and of two pipes; half of them later."""


class GpuAllocation:
    """The leases of this node's GPUs.

    Args:
        directory: Where leases are, of all agents.
        groups: The agent's own, as they come and go.
        end: Ends a worker group and gives its GPUs back.
    """

    def __init__(
        self, directory: Path, groups: Sequence[NodeWorkerGroup], end: Callable[[NodeWorkerGroup], None]
    ) -> None:
        self._leases = devices.Leases(directory)
        self._groups, self._end = groups, end

    def take(self, count: int, found: Sequence[Gpu], label: str) -> tuple[list[Gpu], str, bool]:
        """Lease `count` of the suitable GPUs, also from idle worker groups without kept values.

        Args:
            count: How many.
            found: Those that will do.
            label: Who wants them.

        Returns:
            The GPUs; or none and a sentence that says who has them, and whether waiting can help.
        """
        if len(found) < count:
            visible = f"{len(found)} GPU{'s are' if len(found) != 1 else ' is'} visible here"
            return [], f"--gpus {count} but {visible}; ask for at most that many.", False
        taken: list[Gpu] = []
        holders: dict[str, list[int]] = {}
        for gpu in found:
            if len(taken) == count:
                break
            if self._leases.take(gpu, label) and not self._yielded(gpu, label):
                holders.setdefault(f"{self._leases.holder(gpu)}{self._kept_on(gpu)}", []).append(gpu.index)
            else:
                taken.append(gpu)
        if len(taken) == count:
            return taken, "", False
        self.give_back(taken)
        told = "; ".join(f"{formatting.numbered('GPU', indices)}: {holder}" for holder, indices in holders.items())
        return [], f"--gpus {count} but only {len(taken)} of {len(found)} GPUs are free. {told}.", True

    def give_back(self, gpus: Iterable[Gpu]) -> None:
        for gpu in gpus:
            self._leases.give_back(gpu)

    def described(self) -> tuple[dict[str, object], ...]:
        """Return all GPUs of the node, for the status."""
        return tuple(
            {
                "index": gpu.index,
                "name": gpu.name,
                "memory_bytes": gpu.memory_bytes,
                "used_bytes": gpu.used_bytes,
                "holder": self._leases.holder(gpu),
            }
            for gpu in devices.gpus()
        )

    def _yielded(self, gpu: Gpu, label: str) -> bool:
        """Take a GPU from a worker group that neither runs nor keeps anything."""
        for group in self._groups:
            if gpu in group.gpus and group.idle and not group.kept:
                self._end(group)
                group.tell(WorkerGroupClosed(group=group.name, reason=f"its GPUs went to {label}"), ())
                return not self._leases.take(gpu, label)
        return False

    def _kept_on(self, gpu: Gpu) -> str:
        for group in self._groups:
            if gpu in group.gpus:
                if (current := group.current) is not None:
                    return f" (run {current.run} of {current.label} is on)"
                names = ", ".join(sorted(key.partition("/")[2] for key in group.kept))
                return f" (keeps {names})" if names else ""
        return ""


def no_such_type(wanted: str, found: list[Gpu]) -> str:
    there = devices.types(found) or "no GPU at all"
    return f"--gpu-type {wanted}, but this machine has {there}; leave it out, or use another pool."


def too_many(size: int) -> str:
    """Return why this node cannot start so many ranks; empty if it can."""
    if not 0 < size <= MAX_RANKS:
        return f"one machine can have 1 to {MAX_RANKS} ranks, not {size}."
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and len(os.listdir("/dev/fd")) + size * FDS_PER_RANK > limit:
        return (
            f"{size} ranks need more open files than the {limit} that this system allows (ulimit -n): "
            "raise it, or use fewer ranks."
        )
    return ""
