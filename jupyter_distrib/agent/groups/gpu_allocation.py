"""Limits the resources of an agent's worker groups: their number of ranks, and their GPUs. Runs in the agent's loop.

GPUs are held by leases (`gpus/leases.py`). Idle worker groups give theirs up to others, and after a while by
themselves; with `--wait`, a worker group waits in a queue for GPUs to become free.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jupyter_distrib.agent.gpus import choice as gpu_choice
from jupyter_distrib.agent.gpus.choice import Choice
from jupyter_distrib.agent.gpus.devices import Gpu, GpuProcess, Inventory
from jupyter_distrib.agent.gpus.leases import Leases
from jupyter_distrib.agent.groups.room import within
from jupyter_distrib.agent.groups.state import NodeGroupState as State
from jupyter_distrib.agent.groups.worker_group import NodeWorkerGroup
from jupyter_distrib.agent.ranks.rank import FDS_PER_RANK
from jupyter_distrib.server.worker_group import Client
from jupyter_distrib.system import control_groups, formatting, open_files, outside_text
from jupyter_distrib.system.event_loop import Loop, Timer
from jupyter_distrib.wire import messages as m

MAX_RANKS = 1000
MAX_RANKS_PER_CORE = 128
"""A limit far beyond use: that many ranks take seconds to start, and then hardly advance."""
RANK_BYTES = 16_000_000
"""Memory of its own that a rank has before its first cell (measured with torch 2.13): the least that it needs."""
FIRST_CELL_S = 1.0
"""Seconds for which ranks that have started stay reserved for the notebook that asked for them."""
LOOK_AGAIN_S = 1.0
"""Seconds between attempts: nothing reports when another agent frees a GPU."""
LOOKS = 10
"""Number of checks within the idle limit: nobody notices a delay of a tenth of it."""
MAX_TICK_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Allotted:
    """The GPUs that a worker group has leased."""

    gpus: tuple[Gpu, ...]
    notes: tuple[str, ...] = ()
    """Sentences about the use of these GPUs by others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """The answer to a request for more GPUs than are free."""

    reason: str
    """Sentence about who has the GPUs, and since when."""
    soon_s: float
    """Seconds after which it is clear whether enough GPUs are free: other ranks are leaving, or new worker groups await
    their first cell; 0 if waiting does not help."""


class GpuAllocation:
    """The leases of this node's GPUs.

    Args:
        leases: The leases of this agent.
        groups: The worker groups of this agent; a live view.
        end: Ends a worker group and gives its GPUs back when its ranks are gone.
    """

    def __init__(
        self, leases: Leases, groups: Sequence[NodeWorkerGroup], end: Callable[[NodeWorkerGroup], None]
    ) -> None:
        self._leases, self._groups, self._end = leases, groups, end
        self.given_back = 0
        """Number of times that GPUs were returned: earlier usage readings still include ranks that have ended."""

    def lease(self, choice: Choice, hello: m.Hello, leaving: Mapping[Gpu, float]) -> Allotted | Busy:
        """Lease GPUs of one of the alternatives: free GPUs first, then GPUs of idle worker groups that keep nothing.

        Args:
            choice: The GPUs that suit.
            hello: The kernel that wants them.
            leaving: GPUs of ranks that were asked to leave, and the seconds that this may take.
        """
        for fitting in choice.alternatives:
            size = self._size(choice, fitting, leaving)
            taken = self._free(fitting, size, hello.label)
            missing = size - len(taken)
            in_use = missing - len(leaving.keys() & set(fitting))
            made_room = in_use > 0 and self._make_room(fitting, in_use, hello.label)
            if made_room:
                taken += self._free(fitting, missing, hello.label)
            if len(taken) == size:
                gpus = tuple(sorted(taken, key=fitting.index))
                return Allotted(gpus=gpus, notes=tuple(filter(None, (use_by_others(gpu, hello) for gpu in gpus))))
            self._untake(taken)
            if made_room or in_use <= self._undecided(fitting):
                soon_s = [leaving[gpu] for gpu in fitting if gpu in leaving]
                return Busy(reason=self._shortage(choice), soon_s=max([FIRST_CELL_S, *soon_s]))
        return Busy(reason=self._shortage(choice), soon_s=0.0)

    def lease_free(self, fitting: Sequence[Gpu], count: int, unit: int, label: str) -> tuple[Gpu, ...]:
        """Lease up to this many of the GPUs, a multiple of `unit`, choosing among GPUs that are free and unused."""
        unused = [gpu for gpu in fitting if not gpu.display and (gpu.used_bytes or 0) < gpu_choice.BUSY_BYTES]
        taken = self._free(unused, count, label)
        kept = len(taken) - len(taken) % unit
        self._untake(taken[kept:])
        return tuple(taken[:kept])

    def give_back(self, gpus: Iterable[Gpu]) -> None:
        self.given_back += 1
        self._untake(gpus)

    def _untake(self, gpus: Iterable[Gpu]) -> None:
        for gpu in gpus:
            self._leases.give_back(gpu)

    def statuses(self, inventory: Inventory) -> tuple[m.GpuStatus, ...]:
        """Return the status of each GPU of the node."""
        return tuple(
            m.GpuStatus(
                index=gpu.index,
                number=gpu.number,
                name=gpu.name,
                memory_bytes=gpu.memory_bytes,
                used_bytes=gpu.used_bytes,
                holder=self._leases.holder(gpu),
                modes=modes(gpu),
            )
            for gpu in inventory.gpus
        )

    def _size(self, choice: Choice, fitting: Sequence[Gpu], leaving: Mapping[Gpu, float]) -> int:
        """Return the number of these GPUs to lease: if several will do, as many as can be had now."""
        if not choice.least:
            return choice.size
        idle = {gpu for group in self._groups if self._yields(group) for gpu in group.gpus}
        there = sum(gpu in leaving or gpu in idle or not self._leases.holder(gpu) for gpu in fitting)
        return max(choice.least, within(there, choice.size, choice.unit))

    def _free(self, fitting: Sequence[Gpu], count: int, label: str) -> list[Gpu]:
        """Lease up to this many GPUs, the least used first."""
        taken: list[Gpu] = []
        for gpu in gpu_choice.by_preference(fitting):
            if len(taken) < count and self._leases.lease(gpu, label):
                taken.append(gpu)
        return taken

    def _make_room(self, fitting: Sequence[Gpu], missing: int, label: str) -> bool:
        """End idle worker groups that keep nothing, if that frees as many GPUs as are missing; no more groups than
        necessary."""
        held = {group: len(set(group.gpus) & set(fitting)) for group in self._groups if self._yields(group)}
        if sum(held.values()) < missing:
            return False
        for group in sorted((group for group in held if held[group]), key=lambda group: -held[group]):
            if missing > 0:
                missing -= held[group]
                self._end(group)
                group.emit(m.WorkerGroupClosed(group=group.name, reason=f"its GPUs went to {label}"), ())
        return True

    def _undecided(self, fitting: Sequence[Gpu]) -> int:
        """Count the GPUs that may turn out to be free once new worker groups have got their first cell; 0 if there are
        none."""
        new = {gpu for group in self._groups if self._is_new(group) for gpu in group.gpus} & set(fitting)
        idle = {gpu for group in self._groups if self._yields(group) for gpu in group.gpus} & set(fitting)
        return len(new | idle) if new else 0

    def _yields(self, group: NodeWorkerGroup) -> bool:
        """Return whether a worker group may be ended to free its GPUs for others."""
        return group.idle and not group.kept and not self._is_new(group)

    def _is_new(self, group: NodeWorkerGroup) -> bool:
        """Return whether a worker group has yet to run its first cell, for which its notebook is waiting."""
        age_s = min((self._leases.age_s(gpu) for gpu in group.gpus), default=FIRST_CELL_S)
        return group.idle and not group.ran_s and (group.ranks.starting or age_s < FIRST_CELL_S)

    def _shortage(self, choice: Choice) -> str:
        """Describe who holds the GPUs of the first alternative."""
        holders: dict[str, list[Gpu]] = {}
        for gpu in (fitting := choice.alternatives[0]):
            if holder := self._leases.holder(gpu):
                holders.setdefault(f"{holder}{self._kept_on(gpu)}", []).append(gpu)
        free = len(fitting) - sum(map(len, holders.values()))
        in_use = "; ".join(f"{gpu_choice.numbers(gpus)}: {holder}" for holder, gpus in holders.items())
        wait = f"Wait for them with --wait S, or free them: {self._freeing(fitting)}."
        return f"--gpus {choice.asked}, but only {free} of {len(fitting)} GPUs are free. {in_use}. {wait}"

    def _freeing(self, gpus: Sequence[Gpu]) -> str:
        """Describe how the user can free these GPUs."""
        on_them = [group for group in self._groups if set(group.gpus) & set(gpus)]
        runs = [group.current.run for group in on_them if group.detached and group.current is not None]
        attach = [f"`%distributed_attach {run}` shows the detached run" for run in runs]
        return ", ".join(["`%distributed_pool stop` in that notebook does it", *attach])

    def _kept_on(self, gpu: Gpu) -> str:
        for group in self._groups:
            if gpu in group.gpus:
                if (current := group.current) is not None:
                    return f" (run {current.run} of {current.label} is on)"
                names = ", ".join(sorted(key.partition("/")[2] for key in group.kept))
                return f" (keeps {names})" if names else ""
        return ""


def modes(gpu: Gpu) -> str:
    """Describe the special modes of a GPU: `exclusive process, MPS`; empty for most."""
    found = {
        "MIG slice": gpu.slice is not None,
        "exclusive process": gpu.exclusive,
        "MPS": gpu.mps,
        "display": gpu.display,
        "system memory": gpu.shares_memory,
    }
    return ", ".join(name for name, holds in found.items() if holds)


def use_by_others(gpu: Gpu, hello: m.Hello) -> str:
    """Describe the use by others of a GPU that is free by its lease; empty if they use little."""
    living = [each for each in gpu.processes if _is_there(each)]
    gone_bytes = sum(each.used_bytes or 0 for each in gpu.processes if each not in living)
    used_bytes = (gpu.used_bytes or 0) - gone_bytes
    if gpu.shares_memory or used_bytes < gpu_choice.BUSY_BYTES:
        return ""
    of = f" of {formatting.size(gpu.memory_bytes)}" if gpu.memory_bytes else ""
    who = ", ".join(_process_name(each, hello) for each in living) or "others"
    return f"GPU {gpu.number}: {formatting.size(used_bytes)}{of} are in use already, by {who}."


def _is_there(process: GpuProcess) -> bool:
    return Path(f"/proc/{process.pid}").exists()


def _process_name(process: GpuProcess, hello: m.Hello) -> str:
    """Name a process: `process 4242 (python, user alice)`."""
    if process.pid == hello.pid:
        return "this notebook's own kernel"
    uid = outside_text.owner_of(process.pid)
    user = "" if uid is None else f"user {outside_text.user_name(uid)}"
    about = ", ".join(filter(None, (outside_text.program_of(process.pid), user)))
    return f"process {process.pid}" + (f" ({about})" if about else "")


def too_many(size: int) -> str:
    """Return why this node cannot start this many ranks; empty if it can."""
    if not 0 < size <= MAX_RANKS:
        return f"one machine can have 1 to {MAX_RANKS} ranks, not {size}."
    if not open_files.has_room(size * FDS_PER_RANK):
        return f"{size} ranks need more open files. {open_files.advice()}"
    return ""


def too_many_for_cpus(size: int) -> str:
    """Return why the cores or the memory of this node cannot have this many CPU ranks; empty if they can."""
    cores = control_groups.cores()
    if size <= cores:
        return ""
    if size > MAX_RANKS_PER_CORE * cores:
        has = f"has {cores} cores" if cores > 1 else "has one core"
        return (
            f"{size} ranks are too many for {platform.node()}, which {has}: ask for at most "
            f"{MAX_RANKS_PER_CORE * cores}."
        )
    if size * RANK_BYTES > (free_bytes := control_groups.free_memory_bytes()):
        return (
            f"{size} ranks need at least {formatting.size(size * RANK_BYTES)} of memory, and {platform.node()} has "
            f"{formatting.size(free_bytes)} free; ask for fewer."
        )
    return ""


@dataclass(slots=True, kw_only=True, eq=False)
class _Waiting:
    client: Client[Any]
    command: m.OpenWorkerGroup
    until_s: float


class WaitingGroups:
    """The waiting worker groups of one agent.

    Args:
        reopen: Retries the command: opens the worker group, refuses it, or queues it again.
        send: Sends an event to a kernel.
    """

    def __init__(
        self,
        loop: Loop,
        reopen: Callable[[Client[Any], m.OpenWorkerGroup], None],
        send: Callable[[Client[Any], m.WorkerGroupQueued], None],
    ) -> None:
        self._loop, self._reopen, self._send = loop, reopen, send
        self._waiting: list[_Waiting] = []
        self._sent: dict[str, str] = {}
        """The reason last sent to each worker group, by name."""
        self._timer: Timer | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, client: Client[Any], command: m.OpenWorkerGroup, reason: str) -> None:
        """Queue a command and retry it whenever a GPU may have become free, until its waiting time is over. An empty
        reason is not sent."""
        self._waiting.append(_Waiting(client=client, command=command, until_s=time.monotonic() + command.wait_s))
        if reason and reason != self._sent.get(command.group):
            self._sent[command.group] = reason
            self._send(client, m.WorkerGroupQueued(group=command.group, reason=reason))
        if self._timer is not None:
            self._timer.cancel()
        soonest_s = min(each.until_s for each in self._waiting) - time.monotonic()
        self._timer = self._loop.later(max(0.0, min(LOOK_AGAIN_S, soonest_s)), self.retry)

    def statuses(self) -> tuple[m.WaitingStatus, ...]:
        """Return the status of each waiting worker group."""
        return tuple(
            m.WaitingStatus(
                holder=each.client.hello.label if each.client.hello else "",
                ranks=each.command.ranks(),
                gpus=each.command.gpus,
                reason=self._sent.get(each.command.group, ""),
            )
            for each in self._waiting
        )

    def remove(self, group: str) -> None:
        """Remove a worker group from the queue."""
        self._sent.pop(group, None)
        self._waiting = [each for each in self._waiting if each.command.group != group]

    def remove_client(self, client: Client[Any]) -> None:
        for each in [each for each in self._waiting if each.client is client]:
            self.remove(each.command.group)

    def retry_soon(self) -> None:
        """Retry soon, because a GPU was returned."""
        if self._waiting:
            self._loop.soon(self.retry)

    def retry(self) -> None:
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            left_s = max(0.0, each.until_s - time.monotonic())
            self._reopen(each.client, replace(each.command, wait_s=left_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """The state of a worker group when it was first found idle."""

    since_s: float
    ran_s: float


class IdleGpus:
    """Ends idle worker groups of one agent that still hold GPUs.

    Args:
        groups: The worker groups of this agent; a live view.
        end: Ends a worker group that was idle for these seconds.
    """

    def __init__(
        self, loop: Loop, groups: Sequence[NodeWorkerGroup], end: Callable[[NodeWorkerGroup, float], None]
    ) -> None:
        self._loop, self._groups, self._end = loop, groups, end
        self._limits_s: dict[NodeWorkerGroup, float] = {}
        self._seen: dict[NodeWorkerGroup, _Seen] = {}
        self._ticking = False

    def watch(self, group: NodeWorkerGroup, limit_s: float) -> None:
        """End this worker group when it has been idle for the limit; never, if the limit is 0."""
        if limit_s and group.gpus:
            self._limits_s[group] = limit_s
            self._tick_later()

    def _tick_later(self) -> None:
        if not self._ticking and self._limits_s:
            self._ticking = True
            self._loop.later(min(MAX_TICK_S, min(self._limits_s.values()) / LOOKS), self._tick)

    def _tick(self) -> None:
        self._ticking = False
        self._limits_s = {group: limit_s for group, limit_s in self._limits_s.items() if group in self._groups}
        self._seen = {group: seen for group, seen in self._seen.items() if group in self._limits_s}
        now_s = time.monotonic()
        for group, limit_s in list(self._limits_s.items()):
            seen = self._seen.get(group)
            if group.state is State.STARTING or not group.idle or group.kept:
                self._seen.pop(group, None)
            elif seen is None or seen.ran_s != group.ran_s:  # a cell has run since
                self._seen[group] = _Seen(since_s=now_s, ran_s=group.ran_s)
            elif now_s - seen.since_s >= limit_s:
                self._end(group, limit_s)
        self._tick_later()
