"""One rank's process, as its agent sees it: the link, the output, signals, and its end. Runs in the agent's loop."""

from __future__ import annotations

import codecs
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeAlias

from jupyter_distrib.agent import usage
from jupyter_distrib.agent.output import Pipe
from jupyter_distrib.system import crash_notes, reap
from jupyter_distrib.system.event_loop import Loop
from jupyter_distrib.wire.link import Link, LinkError, encode
from jupyter_distrib.wire.messages import (
    Leave,
    Message,
    ReplaceStreams,
    StreamsReplaced,
    WorkerInfo,
    WorkerOrder,
    Wrote,
)

LEAVE_S = 1.0
"""How long exit handlers may take before the process is killed."""

Heard: TypeAlias = Callable[["Rank", Message, tuple[int, ...]], None]
Writes: TypeAlias = Callable[["Rank", str, bytes], None]


class Rank:
    """A process that is being started, or lives, or has ended.

    Args:
        order: Who it is.
        sweep: Kills what it leaves.
        heard: Takes what it says on the link; the descriptors are closed afterwards.
        wrote: Takes what it writes, by the name of the stream.
        hung_up: Called when it has closed the link and the system will not tell of its end.
    """

    def __init__(
        self,
        order: WorkerOrder,
        loop: Loop,
        sweep: reap.Sweep,
        *,
        heard: Heard,
        wrote: Writes,
        hung_up: Callable[[Rank], None],
    ) -> None:
        self.order = order
        self.pid = 0
        self.state = "starting"
        """`starting`, `idle`, `running`, `gone`."""
        self.early = False
        self.reaped = False
        """The system has forgotten the pid: it must not be signalled any more."""
        self.ended = False
        self.killed = False
        """By us, in the middle of a run; the system has yet to tell of its end."""
        self.loading = ""
        """The variable that it was loading when it ended; see `system/crash_notes.py`."""
        self._loop, self._sweep, self._heard, self._hung_up = loop, sweep, heard, hung_up
        mine, theirs = socket.socketpair()
        mine.setblocking(False)
        self._link = Link(mine)
        self._loading_fd = crash_notes.create()
        self._wrote = wrote
        ends = {name: os.pipe() for name in ("stdout", "stderr")}
        self._pipes = {name: self._pipe(name, read_fd) for name, (read_fd, _) in ends.items()}
        self._late_pipes: list[Pipe] = []
        """The pipes that processes of earlier runs have kept."""
        self.theirs = [theirs.detach(), *(write_fd for _, write_fd in ends.values()), os.dup(self._loading_fd)]
        """The descriptors that the process needs: link, standard output, standard error, crash notes; for the starter
        to close."""
        self._watch()

    @property
    def number(self) -> int:
        return self.order.rank

    @property
    def stderr_tail(self) -> bytes:
        return bytes(self._pipes["stderr"].tail)

    def info(self, device_name: str) -> WorkerInfo:
        return WorkerInfo(
            rank=self.order.rank,
            pid=self.pid,
            device=self.order.device,
            device_name=device_name,
            state=self.state,
            rss_bytes=reap.rss_bytes(self.pid) if self.pid else 0,
        )

    def _pipe(self, name: str, fd: int) -> Pipe:
        return Pipe(self._loop, fd, lambda data: self._wrote(self, name, data))

    # ------------------------------------------------------------------------------------------------ talking

    def post(self, message: Message, fds: Sequence[int] = ()) -> None:
        self.post_frame(encode(message, len(fds)), fds)

    def post_frame(self, frame: bytes, fds: Sequence[int] = ()) -> None:
        """Send, or queue what the socket does not take now; `fds` are duplicated."""
        try:
            self._link.post(frame, fds)
            self._link.flush()
        except OSError:
            return  # its end is news of its own
        if self._link.unsent:
            self._watch()

    def hear_out(self) -> None:
        """Take in all that it has said and written, when it is gone."""
        while self._read():  # its end of the link is closed, unless a child holds it
            if not self._link.wait(0):
                break
        self.drain()

    def drain(self) -> None:
        """Take in all that it has written so far."""
        for pipe in self._pipes.values():
            pipe.drain()

    def _watch(self) -> None:
        self._loop.watch(self._link.fileno(), self._readable, self._flush if self._link.unsent else None)

    def _flush(self) -> None:
        try:
            self._link.flush()
        except OSError:
            return  # its end is news of its own
        self._watch()

    def _readable(self) -> None:
        if not self._read():
            self._loop.watch(self._link.fileno(), None)
            if sys.platform != "linux":
                self._hung_up(self)

    def _read(self) -> bool:
        """Take in what it says; False once it has said its last."""
        try:
            for message, fds in self._link.read():
                if isinstance(message, StreamsReplaced):
                    self._part(message.run, fds)
                else:
                    self._heard(self, message, tuple(fds))
                for fd in fds:
                    os.close(fd)
        except (EOFError, OSError, LinkError):
            return False
        return True

    def split(self, run: str) -> None:
        """Have it part with its pipes, which something that this run has left writes into. It is idle: what comes
        before it has done so is late output of that run."""
        for name, pipe in self._pipes.items():
            pipe.on_data = self._late(run, name)
        self.post(ReplaceStreams(run=run))

    def _part(self, run: str, fds: Sequence[int]) -> None:
        """Treat what comes through the old pipes from now on as late output of that run."""
        self.drain()
        self._late_pipes = [pipe for pipe in (*self._late_pipes, *self._pipes.values()) if not pipe.closed]
        for (name, pipe), fd in zip(self._pipes.items(), fds, strict=True):
            pipe.on_data = self._late(run, name)
            self._pipes[name] = self._pipe(name, os.dup(fd))

    def _late(self, run: str, name: str) -> Callable[[bytes], None]:
        decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")

        def wrote(data: bytes) -> None:
            text = decoder.decode(data)
            self._heard(self, Wrote(run=run, rank=self.number, stream=name, text=text), ())

        return wrote

    # ------------------------------------------------------------------------------------------------ ending

    def signal(self, number: int, *, whole_group: bool = False) -> None:
        """Every rank leads a process group of its own."""
        if self.reaped or not self.pid:
            return
        with suppress(ProcessLookupError):
            os.kill(-self.pid if whole_group else self.pid, number)

    def kill(self) -> None:
        self.killed = True
        self.signal(signal.SIGKILL)

    def ask_place(self) -> None:
        """Have it write where its main thread is, though it may answer nobody; `place` has it a moment later.

        A process that does not handle the signal, because user code has put another program in its place, would die.
        """
        number = crash_notes.PLACE_SIGNAL
        if number is not None and self._loading_fd >= 0 and usage.catches(self.pid, number):
            crash_notes.clear_place(self._loading_fd)
            self.signal(number)

    @property
    def place(self) -> str:
        return crash_notes.place(self._loading_fd) if self._loading_fd >= 0 else ""

    def dismiss(self, after_s: float) -> None:
        """Have it run its exit handlers and end, a while from now."""
        self._loop.later(after_s, lambda: self.post(Leave()))
        self._loop.later(after_s + LEAVE_S, self.end)

    def end(self) -> None:
        """Kill it, if it lives, and (a moment later) everything it started; close its descriptors. Once."""
        if self.ended:
            return
        self.ended = bool(self.pid)
        if self.pid:
            self.signal(signal.SIGKILL)
            self._sweep.add(self.pid, self.order.worker)
        for pipe in (*self._pipes.values(), *self._late_pipes):
            pipe.close()
        if self._loading_fd >= 0:
            self.loading = crash_notes.read(self._loading_fd)
            os.close(self._loading_fd)
            self._loading_fd = -1
        if self._link.fileno() >= 0:
            self._loop.watch(self._link.fileno(), None)
            self._link.close()
