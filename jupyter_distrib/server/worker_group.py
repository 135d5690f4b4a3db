"""A worker group, as the process that serves it sees it: the ranks that one kernel has asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Generic, Protocol, TypeVar

from jupyter_distrib.system.event_loop import Timer
from jupyter_distrib.wire import endings
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.descriptors import Descriptors
from jupyter_distrib.wire.link import Link

S = TypeVar("S", bound=Enum)
T = TypeVar("T", bound=Enum)
Emit = Callable[[m.Event, tuple[int, ...]], None]


class StateMachine(Generic[S, T]):
    """A state that changes only by the moves of a table.

    Args:
        first: The initial state.
        moves: The next state, by state and trigger.
    """

    def __init__(self, first: S, moves: Mapping[tuple[S, T], S]) -> None:
        self.state = first
        self._moves = moves

    def move(self, trigger: T) -> bool:
        """Make the table's move for this trigger; return False and stay in the same state if there is none."""
        if (self.state, trigger) not in self._moves:
            return False
        self.state = self._moves[self.state, trigger]
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingCell:
    """A cell waiting for its ranks, until it is executed, cancelled or failed."""

    command: m.Execute
    descriptors: Descriptors
    emit: Emit

    def cancel(self) -> None:
        """Report that the cell was stopped before it began."""
        self._end(endings.interrupted(self.command.run, self.command.ranks))

    def fail(self, reason: str) -> None:
        """Report why the cell cannot begin."""
        failure = m.Failure(type_name="jupyter_distrib.errors.PoolError", message=reason)
        self._end(endings.failed(self.command.run, self.command.ranks, failure))

    def fewer(self, ranks: int) -> int:
        """Return the largest number of ranks, up to this many, that the cell accepts; 0 if it needs more."""
        size = ranks - ranks % self.command.rank_unit
        return size if 0 < self.command.min_ranks <= size else 0

    def with_fewer(self, ranks: int, cause: str, nodes: int = 0) -> PendingCell:
        """Return the cell for fewer ranks, on this many nodes, and report the reduction."""
        command = replace(self.command, ranks=tuple(range(ranks)))
        reduced = m.RanksReduced(run=command.run, ranks=command.ranks, cause=cause, nodes=nodes, at_s=time.monotonic())
        self.emit(reduced, ())
        return replace(self, command=command)

    def _end(self, events: Sequence[m.RunEvent]) -> None:
        self.descriptors.close()
        for event in events:
            self.emit(event, ())


class RunOfGroup(Protocol):
    """A run that a worker group executes."""

    @property
    def command(self) -> m.Execute: ...


R = TypeVar("R", bound=RunOfGroup)


class ServedWorkerGroup(Protocol):
    """The interface of a worker group to the `Server` that serves it."""

    command: m.OpenWorkerGroup
    """The command that asked for the group, with its final `gpus` and `size`."""
    kept: dict[str, float]
    """Creation time of each value kept on the ranks (seconds since 1970), by key."""

    @property
    def name(self) -> str: ...

    @property
    def closed(self) -> bool:
        """Return whether `close` was called."""

    @property
    def idle(self) -> bool:
        """Return whether the group executes no cell, and none waits for its ranks."""

    @property
    def current(self) -> m.Execute | None:
        """Return the cell that the group executes, or is about to execute."""

    @property
    def detached(self) -> bool:
        """Return whether that cell goes on without its kernel."""

    def find_room(self, size: int, unit: int, then: Callable[[int], None]) -> None:
        """See `server.growth.Growing`."""

    def drop_room(self) -> None:
        """See `server.growth.Growing`."""

    def nodes(self) -> int:
        """See `server.growth.Growing`."""

    def is_for(self, run: str) -> bool:
        """Return whether the current cell is this run."""

    def infos(self) -> tuple[m.WorkerInfo, ...]:
        """Describe the ranks, in their order."""

    def execute(self, command: m.Execute, descriptors: Descriptors, emit: Emit, frame: bytes = b"") -> None:
        """Execute a cell, now or when its ranks are ready; `frame` is the command as it came."""

    def stop(self, *, force: bool = False) -> None:
        """Stop the current cell: step by step, or with `force` by killing its ranks."""

    def ask_stacks(self) -> None:
        """Have the ranks of the current cell report their Python stacks."""

    def debug(self, command: m.Debug) -> None:
        """Pass a command on to the debugger of a rank."""

    def forget(self, command: m.Forget) -> None:
        """Drop kept values."""

    def close(self, *, force: bool, reason: str = "") -> None:
        """End every rank: at once, or after its exit handlers. The current cell ends now, for this reason."""


class WorkerGroupState(Generic[R]):
    """The state that worker groups of an agent and of the coordinator share: the command, and the cell that they
    execute.

    Args:
        command: The command that asked for the worker group.
        emit: Sends an event to the kernel.
    """

    def __init__(self, command: m.OpenWorkerGroup, emit: Emit) -> None:
        self.command, self.emit = command, emit
        self.kept: dict[str, float] = {}
        self.run: R | None = None
        self.pending: PendingCell | None = None
        self.ran_s = 0.0
        self.on_ended: Callable[[R], Any] = lambda run: None

    @property
    def name(self) -> str:
        return self.command.group

    @property
    def idle(self) -> bool:
        return self.run is None and self.pending is None

    @property
    def current(self) -> m.Execute | None:
        return self.run.command if self.run else self.pending.command if self.pending else None

    @property
    def detached(self) -> bool:
        return self.current is not None and self.current.detached

    def is_for(self, run: str) -> bool:
        return self.current is not None and self.current.run == run

    def pop_pending(self) -> PendingCell | None:
        """Return the cell that waits for the ranks, and clear it."""
        pending, self.pending = self.pending, None
        return pending


G = TypeVar("G", bound=ServedWorkerGroup)


@dataclass(slots=True, kw_only=True, eq=False)
class Client(Generic[G]):
    """One kernel."""

    link: Link
    hello: m.Hello | None = None
    pidfd: int = -1
    groups: dict[str, G] = field(default_factory=dict)
    began_at_s: dict[str, float] = field(default_factory=dict)
    """Start of the last run on each worker group, in seconds since 1970."""
    gathering: Timer | None = None
    """Timer for sending the queued events, if all of them can wait for further events."""

    def gather_no_more(self) -> None:
        """Cancel the timer, because the queued events are sent now."""
        if self.gathering is not None:
            self.gathering.cancel()
            self.gathering = None

    def statuses(self) -> list[m.GroupStatus]:
        """Return the status of each of its worker groups."""
        if self.hello is None:
            return []
        return [
            m.GroupStatus(
                group=group.name,
                holder=self.hello.label,
                session=self.hello.session,
                workers=group.infos(),
                run=group.current.run if group.current else "",
                label=group.current.label if group.current else "",
                began_at_s=self.began_at_s.get(group.name, 0.0) if group.current else 0.0,
                kept=dict(group.kept),
            )
            for group in self.groups.values()
        ]
