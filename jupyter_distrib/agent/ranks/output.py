"""Writes the output of the ranks of one run completely into log files, and in batches to the notebook. Runs in the
agent's loop.

A pipe is read at most every few milliseconds, so that a rank that prints line by line does not wake the agent for each.
"""

from __future__ import annotations

import codecs
import fcntl
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from jupyter_distrib.agent.ranks import torch_log
from jupyter_distrib.agent.ranks.log_file import LogFile
from jupyter_distrib.system import log_folder
from jupyter_distrib.system.event_loop import Callback, Loop, Timer
from jupyter_distrib.wire import messages as m

READ_BYTES = 1 << 20
READ_EVERY_S = 0.005
SEND_EVERY_S = 0.05
SHOWN_BYTES = 32 << 10
"""Maximum bytes of one stream sent to the notebook per batch; the log has everything."""
FIRST_LINES = 20
"""Number of lines at the start of each stream that are always sent to the notebook, if they are short."""
FIRST_BYTES = 8 << 10
TAIL_BYTES = 16 << 10
"""Bytes that hold a crash report: up to 100 frames and the names of all extension modules."""


class Clock(Protocol):
    """The part of a loop that batches need."""

    def later(self, delay_s: float, call: Callback) -> Timer: ...


class RunOutput:
    """The logs and batches of one run."""

    def __init__(self, run: str, directory: Path, loop: Clock, send: Callable[[m.Wrote | m.Noted], None]) -> None:
        self.run, self.directory = run, directory
        self._loop, self._send = loop, send
        self._logs: dict[int, LogFile] = {}
        self._ended = self._closed = False
        self._batches: dict[tuple[int, str], _Batch] = {}
        self._timer: Timer | None = None

    @property
    def log_directory(self) -> str:
        """Return the folder of the logs; empty if no rank wrote anything."""
        return str(self.directory) if self._logs else ""

    def write(self, rank: int, stream: str, data: bytes, *, show: bool = True) -> None:
        self._log(rank, data)
        if show:
            self._batches.setdefault((rank, stream), _Batch()).add(data)
            if self._timer is None:
                self._timer = self._loop.later(SEND_EVERY_S, self.flush)

    def flush(self) -> None:
        """Send the output that has arrived since the last batch."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = time.monotonic()
        for log in self._logs.values():  # first, since a program that is notified of output may read it there
            log.flush()
        for (rank, stream), batch in self._batches.items():
            for text, skipped in (batch.pop_first(), batch.pop()):
                if text or skipped:
                    self._send(
                        m.Wrote(run=self.run, rank=rank, stream=stream, text=text, skipped_lines=skipped, at_s=now)
                    )

    def end(self) -> None:
        """Close the logs at the end of the run; later output is appended to them."""
        self.flush()
        self._ended = True
        for log in self._logs.values():
            log.close()

    def close(self) -> None:
        """Close for good: later output is lost."""
        self.end()
        self._closed = True

    def _log(self, rank: int, data: bytes) -> None:
        if self._closed:
            return
        if rank not in self._logs:
            self._logs[rank] = LogFile(self.directory / f"rank{rank}.log")
        log = self._logs[rank]
        for text in (log.write(data), log_folder.of(self.directory.parent).pop_notice()):
            if text:
                self._send(m.Noted(run=self.run, rank=rank, text=text))
        if self._ended:
            log.close()


class _Batch:
    """The output of one stream since the last batch; only its end if it is too long."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._data = bytearray()
        self._skipped = 0
        self._first = bytearray()
        """The first lines of the stream, kept so that a flood of output does not push them out."""
        self._first_left = FIRST_LINES

    def add(self, data: bytes) -> None:
        self._data += data
        if len(self._data) > 8 * SHOWN_BYTES:
            self._trim()

    def pop_first(self) -> tuple[str, int]:
        """Return the first lines of a stream that starts with more output than can be shown; else nothing."""
        self._data[:] = torch_log.without_stacks(self._data)
        if len(self._data) > SHOWN_BYTES:
            self._trim()
        text = self._first.decode("utf-8", "replace")
        self._first.clear()
        return text, 0

    def pop(self) -> tuple[str, int]:
        if len(self._data) > SHOWN_BYTES:
            self._trim()
        if self._first_left:
            self._first_left = max(0, self._first_left - self._data.count(b"\n"))
        text, skipped = self._decoder.decode(bytes(self._data)), self._skipped
        self._data.clear()
        self._skipped = 0
        return text, skipped

    def _trim(self) -> None:
        """Keep the last lines, and the first lines of the stream; a line longer than everything that is shown loses
        its beginning."""
        if self._first_left:
            self._keep_first()
        room = len(self._data) - SHOWN_BYTES
        cut = self._data.find(b"\n", room, len(self._data) - 1) + 1 or room
        self._skipped += self._data.count(b"\n", 0, cut)
        del self._data[:cut]
        self._decoder.reset()

    def _keep_first(self) -> None:
        """Keep the first lines of the stream, as far as they are short."""
        end = 0
        for _ in range(self._first_left):
            next_end = self._data.find(b"\n", end, FIRST_BYTES) + 1
            if not next_end:
                break
            end = next_end
        self._first += self._data[:end]
        del self._data[:end]
        self._first_left = 0


class Pipe:
    """The read end of a rank's standard output or error."""

    def __init__(self, loop: Loop, fd: int, on_data: Callable[[bytes], None]) -> None:
        self.on_data = on_data
        self._loop, self._fd = loop, fd
        self.tail = bytearray()
        os.set_blocking(fd, False)
        with suppress(OSError, AttributeError):  # an unprivileged user's pipes may be full; the default size works too
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, READ_BYTES)
        self._watch()

    @property
    def closed(self) -> bool:
        return self._fd < 0

    def _watch(self) -> None:
        if self._fd >= 0:
            self._loop.watch(self._fd, self._readable)

    def _readable(self) -> None:
        self.drain(limit=READ_BYTES)
        if self._fd >= 0:
            self._loop.watch(self._fd, None)
            self._loop.later(READ_EVERY_S, self._watch)

    def drain(self, limit: int | None = None) -> None:
        """Read all that is available, or about `limit` bytes."""
        while self._fd >= 0 and (limit is None or limit > 0):
            try:
                data = os.read(self._fd, READ_BYTES)
            except (BlockingIOError, InterruptedError):
                return
            if not data:
                return self.close()
            self.tail = (self.tail + data)[-TAIL_BYTES:]
            self.on_data(data)
            limit = limit and limit - len(data)

    def close(self) -> None:
        if self._fd >= 0:
            self._loop.watch(self._fd, None)
            os.close(self._fd)
            self._fd = -1


def write_late(logs: Path, rank: int, event: m.Wrote) -> None:
    """Log what a thread or process of an earlier run wrote, if its log can still be written; no cell shows it."""
    log = LogFile(logs / event.run / f"rank{rank}.log")
    log.write(event.text.encode("utf-8", "backslashreplace"))
    log.close()
