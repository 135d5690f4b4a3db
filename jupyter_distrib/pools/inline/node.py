"""The node of an inline pool: executes cells in the thread that sends them. `run.py` executes one cell."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

from jupyter_distrib.errors import PoolError
from jupyter_distrib.pools.base import Node, Sink
from jupyter_distrib.pools.inline.run import InlineRun, InlineWorkerGroup
from jupyter_distrib.wire import endings
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.descriptors import NO_DESCRIPTORS, Descriptors

MAX_RANKS = 1000


class InlineNode(Node):
    """Executes cells in the thread that calls `send`, which returns when the run has ended."""

    def __init__(self, hello: m.Hello, sink: Sink, *, in_steps: bool = False) -> None:
        self._hello, self._sink, self._in_steps = hello, sink, in_steps
        self._groups: dict[str, InlineWorkerGroup] = {}
        self._busy = threading.Lock()
        self._run: InlineRun | None = None
        self._started_s = time.monotonic()

    def send(self, command: m.Command, descriptors: Descriptors = NO_DESCRIPTORS) -> None:
        """See `Node.send`; an `Execute` blocks until the run has ended.

        Raises:
            PoolError: This pool cannot do what the cell asks for; nothing was executed, and the run has ended.
        """
        match command:
            case m.OpenWorkerGroup():
                self._sink(self._open(command), NO_DESCRIPTORS)
            case m.Execute():
                self._execute(command, descriptors)
            case m.Stop():
                if (run := self._run) is not None and run.command.run == command.run:
                    run.stop()
            case m.AskStacks():
                if (run := self._run) is not None and run.command.run == command.run:
                    run.show_stack()
            case m.Forget():
                self._forget(command)
            case m.CloseWorkerGroup():
                if (run := self._run) is not None and run.command.group == command.group:
                    run.stop()
                if self._groups.pop(command.group, None) is not None:
                    self._sink(m.WorkerGroupClosed(group=command.group), NO_DESCRIPTORS)
            case m.Ask():
                self._sink(m.Answered(question=command.question, status=self._status()), NO_DESCRIPTORS)
            case m.Attach():
                self._sink(
                    m.NotAttached(run=command.run, reason="the inline pool has no detached runs."), NO_DESCRIPTORS
                )

    def close(self) -> None:
        self._groups.clear()

    def _open(self, command: m.OpenWorkerGroup) -> m.WorkerGroupOpened | m.WorkerGroupRefused:
        size = command.ranks(0)
        if command.load_env:
            names = ", ".join(command.load_env)
            reason = (
                f"{names} can only take effect when a process starts, and the inline pool uses a running one: "
                "use --pool local."
            )
            return m.WorkerGroupRefused(group=command.group, reason=reason)
        if command.gpu_type:
            reason = f"--gpu-type {command.gpu_type}, but the inline pool has no GPU; use another pool."
            return m.WorkerGroupRefused(group=command.group, reason=reason)
        if not 0 < size <= MAX_RANKS:
            return m.WorkerGroupRefused(
                group=command.group, reason=f"the inline pool has 1 to {MAX_RANKS} ranks, not {size}."
            )
        group = InlineWorkerGroup(orders={order.rank: order for order in _orders(command, size)})
        self._groups[command.group] = group
        return m.WorkerGroupOpened(group=command.group, workers=group.infos(), gpus=False)

    def _execute(self, command: m.Execute, descriptors: Descriptors) -> None:
        with descriptors:
            group = self._groups.get(command.group)
            if group is None:
                return self._report_no_group(command)
            run = self._new_run(command, group, tuple(descriptors))
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

    def _new_run(self, command: m.Execute, group: InlineWorkerGroup, fds: tuple[int, ...]) -> InlineRun:
        if not self._in_steps:
            return InlineRun(command, group, self._sink, fds)
        from jupyter_distrib.pools.inline.stepped_run import SteppedRun

        return SteppedRun(command, group, self._sink, fds)

    def _cannot(self, command: m.Execute) -> str:
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

    def _report_no_group(self, command: m.Execute) -> None:
        for event in endings.lost(command.run, dict.fromkeys(command.ranks, 0)):
            self._sink(event, NO_DESCRIPTORS)

    def _forget(self, command: m.Forget) -> None:
        if (group := self._groups.get(command.group)) is not None:
            for kept in group.kept.values():
                for key in command.keys:
                    kept.pop(key, None)

    def _status(self) -> m.ServerStatus:
        return m.ServerStatus(
            state="no forkserver needed",
            next_rank="at once, in the kernel's own process",
            pid=os.getpid(),
            up_s=time.monotonic() - self._started_s,
            groups=tuple(self._group_status(name, group) for name, group in self._groups.items()),
        )

    def _group_status(self, name: str, group: InlineWorkerGroup) -> m.GroupStatus:
        run = self._run.command if self._run and self._run.command.group == name else None
        return m.GroupStatus(
            group=name,
            holder=self._hello.label,
            session=self._hello.session,
            workers=group.infos(),
            run=run.run if run else "",
            label=run.label if run else "",
            kept={key: 0.0 for kept in group.kept.values() for key in kept},
        )


def _orders(command: m.OpenWorkerGroup, size: int) -> Iterator[m.WorkerOrder]:
    for local_rank in range(size):
        yield m.WorkerOrder(
            group=command.group,
            worker=f"{command.group}.{local_rank}",
            agent_pid=os.getpid(),
            rank=command.first_rank + local_rank,
            world_size=command.world_size or size,
            local_rank=local_rank,
            local_world_size=size,
        )
