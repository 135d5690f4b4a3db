"""Ranks without processes: every rank of a cell runs in the notebook's own process, one after another, in the thread
that sends it.

For looking into a cell: `input()`, `breakpoint()` and the interrupt button work as in any cell. For tests: no process,
no torch, no waiting. A cell sees copies of what it captured and the same surroundings as on other pools, but there is
no process group, so ranks cannot meet in a collective.

    send(Execute) -> for each rank: Started, the cell, Returned | Failed | Interrupted -> Ended -> send returns

How one cell is executed is in `inline_run.py`.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Iterator, Sequence
from typing import ClassVar

from jupyter_distrib.errors import PoolError
from jupyter_distrib.pools.base import Lost, Sink
from jupyter_distrib.pools.inline.run import InlineCrew, InlineRun
from jupyter_distrib.wire.messages import (
    Answered,
    Ask,
    Attach,
    CloseCrew,
    Command,
    CrewClosed,
    CrewOpened,
    CrewRefused,
    Ended,
    Execute,
    Exited,
    Forget,
    Hello,
    NotAttached,
    OpenCrew,
    Stop,
    Welcomed,
    WorkerOrder,
)

DEFAULT_RANKS = 2
MAX_RANKS = 1000


class InlinePool:
    """This process."""

    kind = "inline"
    meaningless: ClassVar = {
        "hang_timeout_s": "its ranks run one after another, so none waits for another",
        "check": "its ranks run one after another, so there are no collectives",
        "wait_s": "its ranks are never busy with something else",
    }

    def connect(self, hello: Hello, sink: Sink, lost: Lost) -> InlineNode:
        node = InlineNode(hello, sink)
        sink(
            Welcomed(
                pid=os.getpid(), python=platform.python_version(), torch=hello.torch, cloudpickle=hello.cloudpickle
            ),
            (),
        )
        return node


class InlineNode:
    """Executes cells in the thread that calls `send`, which returns when the run has ended."""

    def __init__(self, hello: Hello, sink: Sink) -> None:
        self._hello, self._sink = hello, sink
        self._crews: dict[str, InlineCrew] = {}
        self._busy = threading.Lock()
        self._run: InlineRun | None = None
        self._started_s = time.monotonic()

    def send(self, command: Command, fds: Sequence[int] = ()) -> None:
        """See `Node.send`; an `Execute` blocks.

        Raises:
            PoolError: This pool cannot do what the cell asks for; nothing was executed, and the run has ended.
        """
        match command:
            case OpenCrew():
                self._sink(self._open(command), ())
            case Execute():
                self._execute(command, fds)
            case Stop():
                if (run := self._run) is not None and run.command.run == command.run:
                    run.stop()
            case Forget():
                self._forget(command)
            case CloseCrew():
                if (run := self._run) is not None and run.command.crew == command.crew:
                    run.stop()
                if self._crews.pop(command.crew, None) is not None:
                    self._sink(CrewClosed(crew=command.crew), ())
            case Ask():
                self._sink(Answered(question=command.question, answer=self._answer()), ())
            case Attach():
                self._sink(NotAttached(run=command.run, reason="the inline pool has no detached runs."), ())

    def close(self) -> None:
        self._crews.clear()

    def _open(self, command: OpenCrew) -> CrewOpened | CrewRefused:
        size = command.size or DEFAULT_RANKS
        if command.load_env:
            names = ", ".join(command.load_env)
            reason = f"{names}: read when a program loads, too late for this process. Use --pool local."
            return CrewRefused(crew=command.crew, reason=reason)
        if command.gpu_type:
            reason = f"--gpu-type {command.gpu_type}, but the inline pool has no GPU; use another pool."
            return CrewRefused(crew=command.crew, reason=reason)
        if not 0 < size <= MAX_RANKS:
            return CrewRefused(crew=command.crew, reason=f"the inline pool has 1 to {MAX_RANKS} ranks, not {size}.")
        crew = InlineCrew(orders={order.rank: order for order in _orders(command, size)})
        self._crews[command.crew] = crew
        return CrewOpened(crew=command.crew, workers=crew.infos(), gpus=False)

    def _execute(self, command: Execute, fds: Sequence[int]) -> None:
        try:
            crew = self._crews.get(command.crew)
            if crew is None:
                return self._tell_no_crew(command)
            run = InlineRun(command, crew, self._sink, fds)
            if reason := self._cannot(command):
                run.end()
                raise PoolError(reason)
            if not self._busy.acquire(blocking=False):
                run.end()
                raise PoolError("the inline pool runs one cell at a time, and one is still running.")
            try:
                self._run = run
                run.execute()
            finally:
                self._run = None
                self._busy.release()
        finally:
            for fd in fds:
                os.close(fd)

    def _cannot(self, command: Execute) -> str:
        strategy = command.setting.strategy
        if strategy != "none":
            return (
                f"--strategy {strategy} needs ranks that run at the same time, and the inline pool runs one after "
                "another: use --pool local, or --strategy none."
            )
        if command.detached:
            return (
                "the inline pool runs a cell in the notebook's own thread, so it cannot go on without it: "
                "leave out --detach, or use --pool local."
            )
        return ""

    def _tell_no_crew(self, command: Execute) -> None:
        now = time.monotonic()
        for rank in command.ranks:
            self._sink(Exited(run=command.run, rank=rank, pid=0, exit_code=None, asked=False, at_s=now), ())
        self._sink(Ended(run=command.run, at_s=now), ())

    def _forget(self, command: Forget) -> None:
        if (crew := self._crews.get(command.crew)) is not None:
            for kept in crew.kept.values():
                for key in command.keys:
                    kept.pop(key, None)

    def _answer(self) -> dict[str, object]:
        run = self._run.command if self._run else None
        return {
            "pid": os.getpid(),
            "up_s": time.monotonic() - self._started_s,
            "template": "not needed",
            "crews": tuple(
                {
                    "crew": name,
                    "holder": self._hello.label,
                    "session": self._hello.session,
                    "workers": crew.infos(),
                    "run": run.run if run and run.crew == name else "",
                    "label": run.label if run and run.crew == name else "",
                    "kept": {key: 0.0 for kept in crew.kept.values() for key in kept},
                }
                for name, crew in self._crews.items()
            ),
            "detached": (),
            "gpus": (),
        }


def _orders(command: OpenCrew, size: int) -> Iterator[WorkerOrder]:
    for local_rank in range(size):
        yield WorkerOrder(
            crew=command.crew,
            worker=f"{command.crew}.{local_rank}",
            agent_pid=os.getpid(),
            rank=command.first_rank + local_rank,
            world_size=command.world_size or size,
            local_rank=local_rank,
            local_world_size=size,
        )
