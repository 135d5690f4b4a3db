"""A host whose ranks are only numbers, behind a real pipe: `python -m tests.pools.command.simulated_host SECONDS`.

It speaks as `bootstrap` and `PipedRelay` do, without an agent: each rank reports a number and its progress five times a
second and prints a line each second, as a training loop does."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from jupyter_distrib.coordinator.relay import machine, stamp
from jupyter_distrib.system.process_environment import version
from jupyter_distrib.wire import messages
from jupyter_distrib.wire.link import decode_frame, encode
from jupyter_distrib.wire.pipe_link import PipeLink

STEPS_PER_S = 5
_SIZE_DIGITS = 16


class SimulatedHost:
    """The host's side of the pipe."""

    def __init__(self, run_s: float) -> None:
        self._run_s = run_s
        self._link: PipeLink
        self._ranks = range(0)

    def serve(self) -> None:
        _start()
        self._link = PipeLink(0, 1)
        threading.Thread(target=self._keep_alive, daemon=True).start()
        while True:
            call = self._link.receive()
            if isinstance(call, messages.RelayCall):
                value = self._value(call.method, *call.arguments)  # type: ignore[misc]
                if call.number:
                    contents = () if call.method == "logs" else None
                    self._link.send(messages.RelayReturned(number=call.number, value=value, contents=contents))

    def _value(self, method: str, *arguments: Any) -> object:
        match method:
            case "start":
                here = {"address": "127.0.0.1", "outer": "127.0.0.1", "machine": machine()}
                return {**here, "cpus": 8.0, "memory_bytes": 1 << 33}
            case "describe":
                names = {name: version(name) for name in ("torch", "cloudpickle")}
                about = {"pid": 1, "agent": 1, "python": platform.python_version(), **names, "host": "127.0.0.1"}
                more = {"interface": "lo", "machine": machine(), "folder": stamp(arguments[1]), "user": -1}
                more["agent_folder"] = ""
                return json.dumps({**about, **more})
            case "gpus":
                return {"names": (), "holders": ()}
            case "send":
                self._obey(decode_frame(arguments[0])[0])
            case "end":
                os._exit(0)
        return None

    def _obey(self, command: messages.Message) -> None:
        if isinstance(command, messages.OpenWorkerGroup):
            self._ranks = range(command.first_rank, command.first_rank + command.size)
            workers = tuple(messages.WorkerInfo(rank=rank, pid=rank + 1, device="cpu") for rank in self._ranks)
            self._pass_on(messages.WorkerGroupOpened(group=command.group, workers=workers, gpus=False))
        elif isinstance(command, messages.Execute):
            threading.Thread(target=self._run, args=(command.run,), daemon=True).start()

    def _run(self, run: str) -> None:
        at_s = time.monotonic()
        self._pass_on(
            *(messages.Started(run=run, rank=each, pid=each + 1, device="cpu", at_s=at_s) for each in self._ranks)
        )
        for step in range(1, int(self._run_s * STEPS_PER_S) + 1):
            time.sleep(1 / STEPS_PER_S)
            self._pass_on(*(event for rank in self._ranks for event in events_of_a_step(run, rank, step)))
        self._pass_on(*(messages.Returned(run=run, rank=rank, value=None) for rank in self._ranks))
        self._pass_on(messages.Ended(run=run, at_s=time.monotonic()))

    def _pass_on(self, *events: messages.Event) -> None:
        self._link.send(messages.RelayPassed(frames=b"".join(map(encode, events))))

    def _keep_alive(self) -> None:
        while True:
            time.sleep(1)
            self._link.send(messages.RelayAlive())


def events_of_a_step(run: str, rank: int, step: int) -> Iterator[messages.Event]:
    """Yield what one rank reports at one step."""
    yield messages.Measured(run=run, rank=rank, step=step, values={"loss": 1 / step}, at_s=0.0)
    yield messages.Progressed(run=run, rank=rank, label="step", step=step, total=1000, at_s=0.0)
    if step % STEPS_PER_S:
        return
    yield messages.Wrote(run=run, rank=rank, stream="stdout", text=f"step {step} of rank {rank}: loss {1 / step}\n")
    yield messages.Sampled(
        run=run,
        rank=rank,
        rss_bytes=200 << 20,
        cpu_percent=99.0,
        gpu_memory_bytes=None,
        gpu_memory_total_bytes=None,
        gpu_percent=None,
        at_s=0.0,
    )


def _start() -> None:
    """Answer the first line as `bootstrap`'s program does, and read the package away."""
    line = b""
    while not line.endswith(b"\n"):
        line += _read(1)
    match = re.search(rb"0:([0-9a-f]{16}) %d", line)
    assert match is not None
    os.write(1, b"\0:%s %d.%d\n" % (match[1], *sys.version_info[:2]))
    left = int(_read(_SIZE_DIGITS))
    while left:
        left -= len(_read(min(left, 1 << 20)))


def _read(count: int) -> bytes:
    data = b""
    while len(data) < count:
        if not (part := os.read(0, count - len(data))):
            raise EOFError
        data += part
    return data


if __name__ == "__main__":
    SimulatedHost(float(sys.argv[1])).serve()
