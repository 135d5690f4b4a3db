"""One end of a pair of pipes that carries messages without file descriptors: standard input and output of a command.

Blocking: `receive` is for one thread, `send` for any."""

from __future__ import annotations

import os
import threading

from jupyter_distrib.wire.link import decode_frame, encode, frame_length
from jupyter_distrib.wire.messages import Message

_READ_BYTES = 1 << 18


class PipeLink:
    """A stream of messages over two pipes.

    Args:
        reading: Descriptor from which messages are read.
        writing: Descriptor to which they are written.
    """

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._incoming = bytearray()
        self._lock = threading.Lock()
        """Lock held to write, so that each frame is whole."""

    def send(self, message: Message) -> None:
        """Send a message; waits while the peer does not read."""
        with self._lock:
            data = memoryview(encode(message))
            while data:
                data = data[os.write(self._writing, data) :]

    def receive(self) -> Message:
        """Wait for a message. Raises `EOFError` when the peer has gone."""
        while (length := frame_length(self._incoming)) is None or len(self._incoming) < length:
            if not (data := os.read(self._reading, _READ_BYTES)):
                raise EOFError
            self._incoming += data
        frame = bytes(memoryview(self._incoming)[:length])
        del self._incoming[:length]
        return decode_frame(frame)[0]
