"""Hundreds of ranks that cost nothing: a pool whose nodes are made up, behind a real coordinator and its real link.

`SimulatedPool` is given to a kernel; `python -m simulated ...` is the coordinator that it starts. Each rank reports a
number, its progress and a line now and then, as a training loop does, and its node samples it once a second."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from jupyter_distrib.coordinator.server import Coordinator
from jupyter_distrib.coordinator.worker_group import MultiNodeWorkerGroup, Share
from jupyter_distrib.pools.server_home import Home
from jupyter_distrib.pools.server_link import LocalNode
from jupyter_distrib.system.event_loop import Loop
from jupyter_distrib.wire import messages
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.link import Link

STEPS_PER_S = 5
"""Of each rank: so often it reports a number and its progress."""
LINES_PER_S = 1
PER_NODE = 8
RUN_S = 10.0


class SimulatedPool:
    kind = "simulated"
    options = ()

    def connect(self, hello: messages.Hello, sink: Callable[..., None], lost: Callable[[str], None]) -> LocalNode:
        home = Home(name="simulated", module="simulated")
        node = LocalNode(Link(home.reach()), sink, lost)
        node.send(hello)
        return node


class LightNode:
    """One node with ranks that are only numbers."""

    host, interface, short_name = "127.0.0.1", "lo", "made up"

    def __init__(self, number: int, group: MultiNodeWorkerGroup, loop: Loop) -> None:
        self.name = f"node {number}"
        self._number, self._group, self._loop = number, group, loop
        self._ranks: range = range(0)
        self._run = ""
        self._step = 0

    def send(self, command: m.Command, fds: Sequence[int] = ()) -> None:
        match command:
            case m.OpenWorkerGroup():
                self._ranks = range(command.first_rank, command.first_rank + command.size)
                workers = tuple(messages.WorkerInfo(rank=rank, pid=rank + 1, device="cpu") for rank in self._ranks)
                self._tell(messages.WorkerGroupOpened(group=command.group, workers=workers, gpus=False))
            case m.Execute():
                self._run, self._step = command.run, 0
                for rank in command.ranks:
                    self._tell(messages.Started(run=self._run, rank=rank, pid=rank + 1, device="cpu", at_s=0.0))
                self._loop.later(1 / STEPS_PER_S, self._go_on)

    def _tell(self, event: messages.Event) -> None:
        self._loop.soon(lambda: self._group.handle_event(self._number, event))

    def _go_on(self) -> None:
        self._step += 1
        for rank in self._ranks:
            for event in self._of_a_step(rank):
                self._tell(event)
        if self._step < RUN_S * STEPS_PER_S:
            self._loop.later(1 / STEPS_PER_S, self._go_on)
            return
        for rank in self._ranks:
            self._tell(messages.Returned(run=self._run, rank=rank, value=None))
        self._tell(messages.Ended(run=self._run, at_s=0.0))

    def _of_a_step(self, rank: int) -> Iterator[messages.Event]:
        run, step = self._run, self._step
        yield messages.Measured(run=run, rank=rank, step=step, values={"loss": 1 / step}, at_s=0.0)
        yield messages.Progressed(run=run, rank=rank, label="step", step=step, total=1000, at_s=0.0)
        if step % (STEPS_PER_S // LINES_PER_S) == 0:
            text = f"step {step} of rank {rank}: loss {1 / step}\n"
            yield messages.Wrote(run=run, rank=rank, stream="stdout", text=text)
        if step % STEPS_PER_S == 0:
            yield messages.Sampled(
                run=run, rank=rank, rss_bytes=200 << 20, cpu_percent=99.0, gpu_memory_bytes=None,
                gpu_memory_total_bytes=None, gpu_percent=None, at_s=0.0,
            )  # fmt: skip

    def fetch_logs(self, run: str, directory: Path, done: Callable[[], None]) -> None:
        done()


class LightPlace:
    """As many made-up nodes as it takes."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def start(self, command: m.OpenWorkerGroup, group: MultiNodeWorkerGroup) -> None:
        sizes = [PER_NODE] * (command.size // PER_NODE)
        shares = [
            Share(node=LightNode(number, group, self._loop), size=size, gpus=False) for number, size in enumerate(sizes)
        ]
        self._loop.soon(lambda: group.on_placed(shares))

    def give_back(self, *, useless: bool, killed: bool) -> None:
        """There is nothing."""


def main(socket_fd: int, directory: str, name: str) -> None:
    coordinator = Coordinator(socket.socket(fileno=socket_fd), Path(directory), name, idle_s=600.0)
    coordinator.find_nodes = lambda client, command: LightPlace(coordinator.loop)
    signal.signal(signal.SIGTERM, lambda *_: coordinator.stop())
    coordinator.run()


def use() -> None:
    """In a kernel, before the extension is loaded: `--pool simulated`."""
    from jupyter_distrib.pools import base

    base._brought = lambda: {"simulated": SimulatedPool}  # noqa: SLF001 - what an entry point would do


def cost() -> str:
    """Of this process so far, as JSON: processor seconds, memory now, and the clock."""
    times = os.times()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    about = {"cpu_s": times.user + times.system, "rss_mb": pages * os.sysconf("SC_PAGE_SIZE") / 2**20}
    return json.dumps({**about, "at_s": time.monotonic()})


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
