"""Holds one rank for its agent: the link, the output, the process and its end, and the memory in which the rank leaves
notes. Runs in the agent's loop."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from jupyter_distrib.agent.ranks import usage
from jupyter_distrib.agent.ranks.streams import RankStreams
from jupyter_distrib.server.watched_link import WatchedLink
from jupyter_distrib.system import crash_notes, reap
from jupyter_distrib.system.event_loop import Loop
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.descriptors import Descriptors

FDS_PER_RANK = 8
"""Number of descriptors used for a rank while it starts: both ends of its link and of two pipes, and its notes twice;
half as many later."""
LEAVE_S = 1.0
"""Seconds that exit handlers may take before the process is killed."""


class RankOwner(Protocol):
    """The worker group of a rank."""

    def on_message(self, rank: Rank, message: m.Message, fds: Sequence[int]) -> None:
        """Handle a message from the rank; the descriptors are closed afterwards."""

    def on_output(self, rank: Rank, stream: str, data: bytes) -> None:
        """Handle output of the rank."""

    def on_hang_up(self, rank: Rank) -> None:
        """Record that the rank has closed its link and the system will not report its end."""


class Rank:
    """A rank whose process is being started, or lives, or has ended.

    Args:
        order: The identity of the rank.
        sweep: Kills the processes that it leaves.
    """

    def __init__(self, order: m.WorkerOrder, loop: Loop, sweep: reap.Sweep, owner: RankOwner) -> None:
        self.order = order
        self.state = "starting"
        """`starting`, `idle`, `running`, `gone`."""
        self.early = False
        """Whether the base forkserver has forked the process."""
        self.reports_reset = order.visible_devices is not None
        """Whether the rank sends `DeviceSettled` after a group reset (or ends), for which the next cell waits."""
        self.process = RankProcess(order.worker, sweep)
        self.notes = RankNotes()
        self.streams = RankStreams(
            loop, on_data=lambda name, data: owner.on_output(self, name, data), on_late_text=self._on_late_text
        )
        ours, theirs = socket.socketpair()
        self._loop, self._owner = loop, owner
        self._link = WatchedLink(loop, ours, on_message=self._on_message, on_end=self._hung_up)
        self.descriptors = Descriptors([theirs.detach(), *self.streams.write_ends, self.notes.descriptor()])
        """Descriptors for the process: link, standard output, standard error, crash notes. The starter of the process
        takes them."""

    @property
    def has_device(self) -> bool:
        """Return whether the rank computes on a GPU."""
        return self.order.visible_devices is not None

    @property
    def number(self) -> int:
        return self.order.rank

    @property
    def pid(self) -> int:
        """Return the process id; 0 until the process is started."""
        return self.process.pid

    def info(self, device_name: str) -> m.WorkerInfo:
        return m.WorkerInfo(
            rank=self.order.rank,
            pid=self.pid,
            device=self.order.device,
            device_name=device_name,
            state=self.state,
            rss_bytes=reap.rss_bytes(self.pid) if self.pid else 0,
        )

    # ------------------------------------------------------------------------------------------------ talking

    def post(self, message: m.Message, fds: Sequence[int] = ()) -> None:
        """Send without blocking; `fds` are duplicated."""
        self._link.post(message, fds)

    def post_frame(self, frame: bytes, fds: Sequence[int] = ()) -> None:
        """Send a message that is encoded already."""
        self._link.post_frame(frame, fds)

    def read_rest(self) -> None:
        """Read all remaining messages and output of a rank whose process has ended."""
        if not self._link.closed:
            self._link.read_rest()
        self.streams.drain()

    def replace_streams(self, run: str) -> None:
        """Make an idle rank replace its pipes, because a process left by this run still writes to them. Output until
        the replacement counts as late output of that run."""
        self.streams.assign_to(run)
        self.post(m.ReplaceStreams(run=run))

    def _on_message(self, message: m.Message, fds: Sequence[int]) -> None:
        self._owner.on_message(self, message, fds)

    def _on_late_text(self, run: str, stream: str, text: str) -> None:
        self._owner.on_message(self, m.Wrote(run=run, rank=self.number, stream=stream, text=text), ())

    def _hung_up(self) -> None:
        if sys.platform != "linux":
            self._owner.on_hang_up(self)

    # ------------------------------------------------------------------------------------------------ ending

    def dismiss(self, after_s: float) -> None:
        """Make the rank run its exit handlers and end after a delay."""
        self._loop.later(after_s, lambda: self.post(m.Leave()))
        self._loop.later(after_s + LEAVE_S, self.end)

    def end(self) -> None:
        """Kill the process, if it is alive, and (a moment later) everything that it started; close the rank's
        descriptors."""
        self.process.end()
        self.descriptors.close()
        self.streams.close()
        self.notes.close()
        self._link.close()


class RankNotes:
    """The notes of one rank."""

    def __init__(self) -> None:
        self._fd = crash_notes.create()
        self.loading = ""
        """Variable being loaded when the rank ended; set once these notes are closed."""
        self.cause = ""
        """The cause of its end that the rank has noted, likewise."""

    def descriptor(self) -> int:
        """Duplicate the descriptor for the rank's process."""
        return os.dup(self._fd)

    def ask_place(self, process: RankProcess) -> None:
        """Make a rank write the place of its main thread, even if it does not respond; `place` returns it a moment
        later.

        A process that does not handle the signal, because user code has put another program in its place, would die.
        """
        number = crash_notes.PLACE_SIGNAL
        if number is not None and self._fd >= 0 and usage.catches(process.pid, number):
            crash_notes.clear_place(self._fd)
            process.signal(number)

    @property
    def place(self) -> str:
        return crash_notes.place(self._fd) if self._fd >= 0 else ""

    def close(self) -> None:
        if self._fd >= 0:
            self.loading, self.cause = crash_notes.read(self._fd)
            os.close(self._fd)
            self._fd = -1


class RankProcess:
    """A process that is being started, or lives, or has ended.

    Args:
        mark: The mark in the environment of what it starts.
        sweep: Kills what it leaves.
    """

    def __init__(self, mark: str, sweep: reap.Sweep) -> None:
        self.mark = mark
        self.pid = 0
        """Process id; 0 until the process is started."""
        self.expected = False
        """Whether the process is being started and may already exist."""
        self.reaped = False
        """Whether the process was reaped, so that its pid must not be signalled any more."""
        self.ended = False
        self.killed = False
        """Whether the agent killed it during a run and its end has not been reported yet."""
        self._sweep = sweep

    @property
    def living(self) -> bool:
        """Return whether the process exists: a killed one keeps its GPU and memory until the system reports its end."""
        return self.expected or (bool(self.pid) and not self.reaped)

    def signal(self, number: int, *, whole_group: bool = False) -> None:
        """Send a signal to the process, or to the process group that it leads."""
        if self.pid and not self.reaped:
            with suppress(ProcessLookupError):
                os.kill(-self.pid if whole_group else self.pid, number)

    def kill(self) -> None:
        """Kill the process; its end is reported separately."""
        self.killed = True
        self.signal(signal.SIGKILL)

    def end(self) -> None:
        """Kill the process, and a moment later everything that it started. Once."""
        if self.pid and not self.ended:
            self.ended = True
            self.signal(signal.SIGKILL)
            self._sweep.add(self.pid, self.mark)
