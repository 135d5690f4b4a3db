"""The kernel's side of one pool, for checks: sends commands, collects events, and checks their order. Kernel side;
standard library and asserts only."""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, overload

from jupyter_distrib.pools.base import Node, Pool
from jupyter_distrib.serialization import payload
from jupyter_distrib.wire.descriptors import NO_DESCRIPTORS, Descriptors
from jupyter_distrib.wire.messages import (
    PROTOCOL,
    Cell,
    CloseWorkerGroup,
    Command,
    Ended,
    Event,
    Execute,
    Exited,
    Failed,
    Failure,
    Hello,
    Interrupted,
    OpenWorkerGroup,
    Parcel,
    Returned,
    RunEvent,
    Sampled,
    Setting,
    Started,
    Welcomed,
    WorkerGroupClosed,
    WorkerGroupOpened,
    WorkerGroupRefused,
    Wrote,
)

E = TypeVar("E")
F = TypeVar("F")

LIMIT_S = 60.0
"""Maximum seconds to wait for one event; a pool may need seconds for its first ranks."""
_TERMINAL = (Returned, Failed, Interrupted, Exited)


class Outcome:
    """The outcome of one run."""

    def __init__(self, events: Sequence[RunEvent], values: Mapping[int, Any]) -> None:
        self.events = tuple(events)
        self.values = dict(values)
        """The values of the cell's last expression, by rank, for ranks that returned."""

    def of(self, kind: type[E], rank: int | None = None) -> list[E]:
        """Return the events of one class, from one rank or from all."""
        return [
            event for event in self.events if isinstance(event, kind) and rank in (None, getattr(event, "rank", None))
        ]

    def text(self, rank: int, stream: str = "stdout") -> str:
        return "".join(event.text for event in self.of(Wrote, rank) if event.stream == stream)

    def failure(self, rank: int) -> Failure:
        return self.of(Failed, rank)[0].failure


class PoolClient:
    """The kernel's side of one pool. `run` returns the outcome of a cell, after checking the order of its events."""

    def __init__(self, pool: Pool, session: str = "") -> None:
        self.session = session or f"check{os.getpid():x}-{time.monotonic_ns():x}"
        self.lost: list[str] = []
        self.seen: queue.SimpleQueue[RunEvent] = queue.SimpleQueue()
        """Run events as they arrive, for `when`, which acts while a run is in progress."""
        self._inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._parcels: dict[tuple[str, int], tuple[Parcel, Descriptors]] = {}
        self._runs = self._groups = 0
        self.node: Node = pool.connect(self._hello(), self._on_event, self.lost.append)
        self.wait(Welcomed)

    def _hello(self) -> Hello:
        return Hello(
            protocol=PROTOCOL,
            session=self.session,
            pid=os.getpid(),
            label="contract suite",
            python="",
            torch="",
            cloudpickle="",
        )

    def _on_event(self, event: Event, descriptors: Descriptors) -> None:
        if isinstance(event, Returned) and event.value is not None:
            self._parcels[event.run, event.rank] = event.value, descriptors
        else:
            assert not descriptors, f"{type(event).__name__} came with descriptors"
        if isinstance(event, RunEvent):
            self.seen.put(event)
        self._inbox.put(event)

    def send(self, command: Command, descriptors: Descriptors = NO_DESCRIPTORS) -> None:
        self.node.send(command, descriptors)

    @overload
    def wait(self, kind: type[E], /) -> E: ...
    @overload
    def wait(self, kind: type[E], other: type[F], /) -> E | F: ...
    def wait(self, *kinds: type) -> Any:
        """Wait for the next event of one of these classes and return it."""
        while True:
            event = self._next()
            if isinstance(event, kinds):
                return event

    def _next(self) -> Event:
        try:
            return self._inbox.get(timeout=LIMIT_S)
        except queue.Empty:
            raise AssertionError(f"nothing came for {LIMIT_S:g} s; lost: {self.lost}") from None

    def open(self, size: int, **fields: Any) -> WorkerGroupOpened | WorkerGroupRefused:
        """Open a new worker group of CPU ranks and return the answer."""
        self._groups += 1
        self.send(OpenWorkerGroup(group=f"{self.session}-c{self._groups}", size=size, gpus=False, **fields))
        return self.wait(WorkerGroupOpened, WorkerGroupRefused)

    def group(self, size: int, **fields: Any) -> WorkerGroupOpened:
        opened = self.open(size, **fields)
        assert isinstance(opened, WorkerGroupOpened), opened
        return opened

    def close_group(self, group: WorkerGroupOpened) -> None:
        self.send(CloseWorkerGroup(group=group.group))
        self.wait(WorkerGroupClosed)

    def start(
        self, group: WorkerGroupOpened, source: str, *, ranks: Sequence[int] = (), keep: Sequence[str] = (), **more: Any
    ) -> str:
        """Send a cell and return the run's id. `more`: `inputs`, `env`, `strategy`, and fields of `Execute`."""
        self._runs += 1
        run = f"{self.session}-{self._runs}"
        parcel, fd = payload.to_parcel(payload.pack_inputs(more.pop("inputs", {}), {}))
        setting = Setting(env=dict(os.environ), directory=os.getcwd(), path=tuple(sys.path), keep=tuple(keep))
        setting = replace(
            setting, env={**setting.env, **more.pop("env", {})}, strategy=more.pop("strategy", setting.strategy)
        )
        command = Execute(
            run=run,
            group=group.group,
            ranks=tuple(ranks) or tuple(worker.rank for worker in group.workers),
            cell=Cell(source=source, filename="Cell In[1]"),
            inputs=parcel,
            setting=setting,
            **more,
        )
        self.send(command, Descriptors(() if fd is None else (fd,)))
        return run

    def finish(self, run: str, ranks: Sequence[int]) -> Outcome:
        """Wait for the end of a run and return its outcome."""
        events: list[RunEvent] = []
        while not (events and isinstance(events[-1], Ended)):
            event = self._next()
            if isinstance(event, RunEvent) and event.run == run:
                events.append(event)
        _check_order(events, ranks)
        values: dict[int, Any] = dict.fromkeys(sorted(e.rank for e in events if isinstance(e, Returned)))
        for rank in values:
            if (run, rank) in self._parcels:
                parcel, descriptors = self._parcels.pop((run, rank))
                values[rank] = payload.unpack_value(*payload.from_parcel(parcel, descriptors.take_one()))
        return Outcome(events, values)

    def run(self, group: WorkerGroupOpened, source: str, **more: Any) -> Outcome:
        ranks = tuple(more.get("ranks", ())) or tuple(worker.rank for worker in group.workers)
        return self.finish(self.start(group, source, **more), ranks)

    def when(self, kind: type, act: Callable[[str], object], count: int = 1) -> threading.Thread:
        """Call `act` with the run's id, in a separate thread, once `count` events of a class have arrived."""

        def follow() -> None:
            left, run = count, ""
            while left:
                event = self.seen.get(timeout=LIMIT_S)
                left, run = left - isinstance(event, kind), event.run
            act(run)

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        self.node.close()
        for _, descriptors in self._parcels.values():
            descriptors.close()
        self._parcels.clear()


def _check_order(events: Sequence[RunEvent], ranks: Sequence[int]) -> None:
    """Check the order of a run's events: one Started, or a Returned that says when the cell began, and one end for
    each rank; one Ended, last. Output and samples of a rank may overtake its start but not its end."""
    assert sum(isinstance(event, Ended) for event in events) == 1, events
    for rank in ranks:
        mine = [event for event in events if getattr(event, "rank", None) == rank]
        ends = [index for index, event in enumerate(mine) if isinstance(event, _TERMINAL)]
        assert len(ends) == 1, f"rank {rank} has {len(ends)} ends: {mine}"
        starts = [
            index
            for index, event in enumerate(e for e in mine if not isinstance(e, (Wrote, Sampled)))
            if isinstance(event, Started)
        ]
        assert starts in ([0], []), f"rank {rank}: Started is not first: {mine}"
        end = mine[ends[0]]
        is_begun = starts or isinstance(end, (Interrupted, Exited)) or (isinstance(end, Returned) and end.began_at_s)
        assert is_begun, f"rank {rank} ended without a start: {mine}"
        assert ends[0] == len(mine) - 1, f"rank {rank} goes on after its end: {mine}"
    others = {getattr(event, "rank", None) for event in events} - {None, *ranks}
    assert not others, f"events of ranks that were not asked: {others}"
