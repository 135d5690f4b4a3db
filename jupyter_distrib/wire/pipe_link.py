"""One end of a pair of pipes that carries messages without file descriptors: standard input and output of a command.

Blocking: `receive` is for one thread, `send` for any."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from contextlib import suppress

from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.link import decode_frame, encode, frame_length

_READ_BYTES = 1 << 18
_TRICKLE_BYTES = 1 << 13
"""Size below which the reader of a large frame pauses for the writer: srun forwards a kilobyte at a time, and a reader
that wakes for each takes the processor from it."""
_GATHER_S = 0.0005
_PIPE_BYTES = 1 << 20
"""Capacity set for the pipe that is read, so that more gathers in it meanwhile."""


class PipeLink:
    """A stream of messages over two pipes.

    Args:
        reading: Descriptor from which messages are read.
        writing: Descriptor to which they are written.
    """

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._incoming = bytearray()
        self.reads = 0
        """Number of reads, which shows whether the peer is silent."""
        self._lock = threading.Lock()
        """Lock held to write, so that each frame is whole."""
        if hasattr(fcntl, "F_SETPIPE_SZ"):
            with suppress(OSError):  # a socket, or more than the system allows
                fcntl.fcntl(reading, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    def send(self, message: m.Message) -> None:
        """Send a message; waits while the peer does not read."""
        with self._lock:
            data = memoryview(encode(message))
            while data:
                data = data[os.write(self._writing, data) :]

    def receive(self) -> m.Message:
        """Wait for a message, whose raw bytes are views. Raises `EOFError` when the peer has gone."""
        while (length := frame_length(self._incoming)) is None:
            self._incoming += self._read()
        frame = memoryview(bytearray(length))  # filled in place, since parts of values are large
        have = min(length, len(self._incoming))
        frame[:have] = self._incoming[:have]
        del self._incoming[:have]
        while have < length:
            if not (count := os.readv(self._reading, [frame[have:]])):
                raise EOFError
            have, self.reads = have + count, self.reads + 1
            if count < _TRICKLE_BYTES <= length - have:
                time.sleep(_GATHER_S)
        return decode_frame(frame)[0]

    def _read(self) -> bytes:
        if not (data := os.read(self._reading, _READ_BYTES)):
            raise EOFError
        self.reads += 1
        return data
