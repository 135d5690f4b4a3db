"""One end of a pair of pipes that carries messages without file descriptors: standard input and output of a command.

When the pipes break, another pair may take their place: no message is lost, and none comes twice (`resumable.py`).

Blocking: `receive` is for one thread, everything else for any."""

from __future__ import annotations

import fcntl
import os
import select
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.link import decode_frame, encode, frame_length
from jupyter_distrib.wire.resumable import HeardMessages, SentMessages, is_counted

_READ_BYTES = 1 << 18
_TRICKLE_BYTES = 1 << 13
"""Size below which the reader of a large frame pauses for the writer: srun forwards a kilobyte at a time, and a reader
that wakes for each takes the processor from it."""
_GATHER_S = 0.0005
_PIPE_BYTES = 1 << 20
"""Capacity set for the pipe that is read, so that more data gathers in it meanwhile."""
STALLED_S = 12.0
"""Seconds in which nothing can be written after which the pipes count as broken."""
CLOSED_S = 1.0
"""Seconds within which the output ends too if the whole connection has ended, and not only the input."""
_MOST_KEPT_BYTES = 16 << 20
"""Size of unsent messages from which `send` waits for the next pipes."""


_Read = TypeVar("_Read", bytes, int)


class PipesBroken(ConnectionError):
    """Raised by a pair of pipes that carries no more messages."""


class PipePair:
    """Two pipes, which can be given up while other threads use them. Owns the descriptors."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._woken, self._wake = os.pipe()
        self.read_lock = threading.Lock()
        """Lock held to read."""
        self.is_broken = False
        for fd in (reading, writing):
            os.set_blocking(fd, False)
            os.set_inheritable(fd, False)
        if hasattr(fcntl, "F_SETPIPE_SZ"):
            with suppress(OSError):  # a socket, or more than the system allows
                fcntl.fcntl(reading, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    def give_up(self) -> None:
        """Wake all threads that wait for the pipes; each gets `PipesBroken`."""
        if not self.is_broken:
            self.is_broken = True
            os.write(self._wake, b"\0")

    def close(self) -> None:
        """Close the descriptors, which nobody may be using."""
        for fd in {self._reading, self._writing, self._woken, self._wake}:
            os.close(fd)

    def read(self, most_bytes: int) -> bytes:
        """Read the available bytes, at least one. Raises `EOFError` or `OSError`."""
        return self._read(lambda: os.read(self._reading, most_bytes))

    def read_into(self, buffer: memoryview) -> int:
        """Read the available bytes into a buffer; return their number. Raises `EOFError` or `OSError`."""
        return self._read(lambda: os.readv(self._reading, [buffer]))

    def _read(self, read: Callable[[], _Read]) -> _Read:
        while True:
            try:
                found = read()
            except BlockingIOError:
                self._wait(self._reading, select.POLLIN)
                continue
            if not found:
                raise EOFError
            return found

    def write(self, data: bytes) -> None:
        """Write all of it. Raises `OSError`."""
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._writing, view) :]
            except BlockingIOError:
                self._wait(self._writing, select.POLLOUT, STALLED_S)

    def _wait(self, fd: int, event: int, limit_s: float | None = None) -> None:
        poll = select.poll()
        poll.register(fd, event)
        poll.register(self._woken, select.POLLIN)
        ready = poll.poll(limit_s and limit_s * 1000)
        if self.is_broken or not ready:
            raise PipesBroken

    def output_ends(self) -> bool:
        """Return whether the output has ended, too, or does soon."""
        poll = select.poll()
        poll.register(self._writing, 0)
        return bool(poll.poll(CLOSED_S * 1000))


class PipeLink:
    """A stream of messages over two pipes, and over others that take their place.

    Args:
        reading: Descriptor from which messages are read.
        writing: Descriptor to which they are written.
    """

    def __init__(self, reading: int, writing: int) -> None:
        self._pipes = PipePair(reading, writing)
        self._incoming = bytearray()
        self.reads = 0
        """Number of reads, which shows whether the peer is silent."""
        self._changed = threading.Condition(threading.Lock())
        """Condition whose lock is held to write, so that each frame is whole, and to exchange the pipes."""
        self._sent, self._heard = SentMessages(), HeardMessages()
        self._over = False
        self.is_broken = False
        """Whether the pipes are broken, and no others have come."""
        self.outlives_its_pipes = False
        """Whether it waits for others when they break."""
        self.input_shows_the_end = False
        """Whether the peer has ended when the input ends and the output does not."""

    def send(self, message: m.Message) -> None:
        """Send a message; waits while the peer does not read. Raises `OSError` when no other pipes will come."""
        frame = encode(message)
        with self._changed:
            if is_counted(message):
                self._sent.add([frame])
            self._write(frame)
            self._changed.wait_for(
                lambda: self._over or not self.is_broken or self._sent.size_bytes <= _MOST_KEPT_BYTES
            )
            if self._over:
                raise PipesBroken

    def send_alive(self) -> None:
        """Tell the peer that this end is alive, and how many messages have come."""
        self.send(m.RelayAlive(heard=self._heard.count))

    def _write(self, frame: bytes) -> None:
        if not self.is_broken:
            try:
                self._pipes.write(frame)
            except OSError:
                self._break()

    def receive(self) -> m.Message:
        """Wait for a message, whose raw bytes are views. Raises `EOFError` when the peer has gone."""
        while True:
            pipes = self._usable()
            try:
                with pipes.read_lock:
                    frame = self._receive_from(pipes)
                    message = decode_frame(frame)[0]
                    is_due = is_counted(message) and self._heard.add(len(frame))
            except (EOFError, OSError) as error:
                self._ended(pipes, closed=isinstance(error, EOFError))
                continue
            if is_due:
                self.send_alive()
            if isinstance(message, m.RelayAlive):
                with self._changed:
                    self._sent.confirm(message.heard)
            return message

    def _usable(self) -> PipePair:
        """Wait for pipes that are not broken. Raises `EOFError` when none will come."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or not self.is_broken)
            if self._over:
                raise EOFError
            return self._pipes

    def _receive_from(self, pipes: PipePair) -> memoryview:
        if pipes.is_broken:
            raise PipesBroken
        while (length := frame_length(self._incoming)) is None:
            self._incoming += pipes.read(_READ_BYTES)
            self.reads += 1
        frame = memoryview(bytearray(length))  # filled in place, since parts of values are large
        have = min(length, len(self._incoming))
        frame[:have] = self._incoming[:have]
        del self._incoming[:have]
        while have < length:
            count = pipes.read_into(frame[have:])
            have, self.reads = have + count, self.reads + 1
            if count < _TRICKLE_BYTES <= length - have:
                time.sleep(_GATHER_S)
        return frame

    # ------------------------------------------------------------------------------------------------ other pipes

    def _ended(self, pipes: PipePair, *, closed: bool) -> None:
        """Handle the end of the pipes that were read."""
        with self._changed:
            if pipes is not self._pipes:
                return  # others have taken their place
            self._break()
            if closed and self.input_shows_the_end and not pipes.output_ends():
                self._over = True
                self._changed.notify_all()

    def _break(self) -> None:
        self._pipes.give_up()
        self.is_broken = True
        self._over |= not self.outlives_its_pipes
        self._changed.notify_all()

    def break_off(self) -> None:
        """Wait for other pipes, because the peer is silent."""
        if not self.is_broken:
            self._pipes.give_up()  # threads that use the pipes release the lock
            with self._changed:
                self._break()

    def resume(self, reading: int, writing: int, heard: int) -> bool:
        """Continue with other pipes.

        Args:
            reading: Descriptor from which messages are read.
            writing: Descriptor to which they are written.
            heard: Number of messages that the peer has heard.

        Returns:
            Whether the peer can continue from there; if so, the caller no longer owns the descriptors.
        """
        if not self._can_go_on(heard):
            return False
        before = self._pipes
        before.give_up()
        with before.read_lock, self._changed:
            if not self._can_go_on(heard):
                self._break()
                return False
            before.close()
            self._incoming.clear()
            self._pipes, self.is_broken = PipePair(reading, writing), False
            self._write(encode(m.RelayResumed(heard=self._heard.count)))
            for frame in self._sent.after(heard):
                self._write(frame)
            self._changed.notify_all()
            return True

    def _can_go_on(self, heard: int) -> bool:
        return not self._over and self._sent.knows(heard)

    def close(self) -> None:
        """Close the pipes, which nobody may be using."""
        self._pipes.close()
