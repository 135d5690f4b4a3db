"""The coordinator: an agent whose worker groups are on other machines. Kernels reach it as they reach an agent, by a
socket of the user's; it outlives them, so that a detached run goes on and is found by the next one.

    kernel A --link--\\            /--> node 0: agent, ranks
                       coordinator -----+
    kernel B --link--/            \\--> node 1: agent, ranks

The kernel itself never talks to the engine, whose library starts threads, takes over signals, and ends the process when
its cluster goes away. Single-threaded, in one `Loop`.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from jupyter_distrib.agent.server import DEFAULT_CPU_RANKS, Agent
from jupyter_distrib.coordinator.run import SpreadRun
from jupyter_distrib.coordinator.worker_group import Placement, SpreadWorkerGroup
from jupyter_distrib.server.client import Client
from jupyter_distrib.system import paths
from jupyter_distrib.system.event_loop import Timer
from jupyter_distrib.wire.messages import Answered, Ask, Event, Hello, Leaving, OpenWorkerGroup, WorkerGroupOpened

MakePlacement = Callable[[Client, OpenWorkerGroup], Placement]
Described = tuple[dict[str, object], ...]
AskNodes = Callable[[Callable[[Described], None]], None]


class Coordinator(Agent):
    """Everything on other machines that belongs to the user's kernels with one environment and one pool.

    Args:
        listener: Bound by the kernel that started it.
        directory: Of sockets and locks.
        name: Of this coordinator's.
        idle_s: Ranks that nobody uses and that keep nothing are given back after so long.
    """

    def __init__(self, listener: socket.socket, directory: Path, name: str, *, idle_s: float) -> None:
        super().__init__(listener, directory, name)
        self._forkservers.start = lambda: None  # type: ignore[method-assign]  # no rank is forked here
        self.loop = self._loop
        self.make_place: MakePlacement
        self.ask_nodes: AskNodes = lambda told: told(())
        """Tells in the loop, soon, what nodes there are: `coordinator/nodes.py:described`."""
        self.title = "not connected"
        self._idle_s = idle_s
        self._leaving = False
        self._unused: dict[str, Timer] = {}

    def run(self) -> None:
        """Until nobody needs it."""
        self.serve()

    def give_up(self, after_s: float) -> None:
        """No cluster can be had: take no new kernels, have those that are here ask another coordinator from now on, and
        end when what they have asked before is answered."""
        self._unlink()
        self._leaving = True
        for client in self._clients:
            self._tell(client, Leaving())
        self._loop.later(after_s, self.stop)

    def lose(self, reason: str, after_s: float) -> None:
        """The cluster can never be reached again by this process: tell it all worker groups, and give up."""
        self.give_up(after_s)
        groups: list[SpreadWorkerGroup] = list(self._groups)  # type: ignore[arg-type]
        for group in groups:
            group.lose(reason)

    def _welcome(self, client: Client, hello: Hello) -> None:
        super()._welcome(client, hello)
        if self._leaving:  # it came by the name that is gone now
            self._tell(client, Leaving())

    def _open(self, client: Client, command: OpenWorkerGroup) -> None:
        size = command.size or (0 if command.gpus else DEFAULT_CPU_RANKS)
        command = replace(command, size=size)
        group = SpreadWorkerGroup(
            command,
            loop=self._loop,
            place=self.make_place(client, command),
            logs=paths.log_directory(),
            tell=lambda event, fds: self._heard(client, group, event, fds),
        )
        group.on_ended = lambda run: self._has_ended(client, group, run)
        group.on_closed = lambda: self._close(group, force=True)  # type: ignore[arg-type]
        client.groups[command.group] = group
        self._groups.append(group)  # type: ignore[arg-type]
        group.open()

    def _heard(self, client: Client, group: SpreadWorkerGroup, event: Event, fds: tuple[int, ...]) -> None:
        self._tell(client, event, fds)
        if isinstance(event, WorkerGroupOpened):
            self._count_idle(group)

    def _has_ended(self, client: Client, group: SpreadWorkerGroup, run: SpreadRun) -> None:
        self._run_ended(client, group, run)  # type: ignore[arg-type]
        self._count_idle(group)

    def _count_idle(self, group: SpreadWorkerGroup) -> None:
        """Start counting anew."""
        if (timer := self._unused.pop(group.name, None)) is not None:
            timer.cancel()
        if not group.closed:
            self._unused[group.name] = self._loop.later(self._idle_s, lambda: self._release(group))

    def _release(self, group: SpreadWorkerGroup) -> None:
        if group.closed:
            return
        if group.kept or not group.idle:
            return self._count_idle(group)
        group.end(f"released after {self._idle_s:g} s without a cell", set())

    def _reap(self) -> None:
        """Ranks are no children of the coordinator."""

    def _answer_to(self, client: Client, ask: Ask) -> None:
        def tell(nodes: Described) -> None:
            there = {"name": self.title, "state": self.title, "nodes": nodes, "gpus": ()}
            sums = {key: sum(node[key] for node in nodes) for key in ("cpus", "memory_bytes")}  # type: ignore[misc]
            self._tell(client, Answered(question=ask.question, answer={**self._answer(), **there, **sums}))

        self.ask_nodes(tell)
