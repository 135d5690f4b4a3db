"""Writes the output of the ranks of one run completely into log files, and in batches to the notebook. Runs in the
agent's loop.

A pipe is read at most every few milliseconds, so that a rank that prints line by line does not wake the agent for each.
"""

from __future__ import annotations

import codecs
import fcntl
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from jupyter_distrib.system import record_file
from jupyter_distrib.system.event_loop import Callback, Loop, Timer
from jupyter_distrib.wire.messages import Noted, Wrote

READ_BYTES = 1 << 20
READ_EVERY_S = 0.005
SEND_EVERY_S = 0.05
SHOWN_BYTES = 32 << 10
"""Bytes of one stream between two batches that go to the notebook at most; the log has all."""
FIRST_LINES = 20
"""Lines at the beginning of each stream that go to the notebook also in a flood, if they are short."""
FIRST_BYTES = 8 << 10
LOG_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""The flags to open a log with: a link in its place is an error, and nobody waits for the reader of a FIFO."""
LOG_LIMIT_BYTES = int(os.environ.get("JUPYTER_DISTRIB_LOG_LIMIT_BYTES", str(1 << 30)))
TAIL_BYTES = 16 << 10
"""Bytes that hold a crash report: up to 100 frames and the names of all extension modules."""


class Clock(Protocol):
    """The part of a loop that batches need."""

    def later(self, delay_s: float, call: Callback) -> Timer: ...


class RunOutput:
    """The logs and batches of one run."""

    def __init__(self, run: str, directory: Path, loop: Clock, send: Callable[[Wrote | Noted], None]) -> None:
        self.run, self.directory = run, directory
        self._loop, self._send = loop, send
        self._logs: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
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
        for (rank, stream), batch in self._batches.items():
            for text, skipped in (batch.take_first(), batch.take()):
                if text or skipped:
                    self._send(
                        Wrote(run=self.run, rank=rank, stream=stream, text=text, skipped_lines=skipped, at_s=now)
                    )

    def close(self) -> None:
        self.flush()
        for fd in self._logs.values():
            if fd >= 0:
                os.close(fd)
        self._logs = dict.fromkeys(self._logs, -1)

    def _log(self, rank: int, data: bytes) -> None:
        if rank not in self._logs:
            self._logs[rank] = self._open(rank)
        fd, size = self._logs[rank], self._sizes.get(rank, 0)
        if fd < 0:
            return
        try:
            if size + len(data) > LOG_LIMIT_BYTES:
                raise OSError(f"it has reached {LOG_LIMIT_BYTES >> 20} MB")
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            self._sizes[rank] = size + len(data)
        except OSError as error:
            self._give_up(rank, fd, error)

    def _open(self, rank: int) -> int:
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(self.directory / f"rank{rank}.log", LOG_FLAGS, 0o600)
        except OSError as error:
            self._send(Noted(run=self.run, rank=rank, text=f"the log cannot be written: {error}"))
            return -1
        with suppress(OSError):  # not every file system has locks
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return fd

    def _give_up(self, rank: int, fd: int, error: OSError) -> None:
        """Stop logging a rank, because the run matters more than its log, and report where the log is cut off."""
        with suppress(OSError):
            os.write(fd, b"\n[log truncated here]\n")
        os.close(fd)
        self._logs[rank] = -1
        self._send(Noted(run=self.run, rank=rank, text=f"the log of rank {rank} is truncated: {error}"))


class _Batch:
    """The output of one stream since the last batch, cut to its end if it is too long."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._data = bytearray()
        self._skipped = 0
        self._first = bytearray()
        """The first lines of the stream, if they would not be shown without this."""
        self._first_left = FIRST_LINES

    def add(self, data: bytes) -> None:
        self._data += data
        if len(self._data) > 8 * SHOWN_BYTES:
            self._trim()

    def take_first(self) -> tuple[str, int]:
        """Return the first lines of a stream that begins with more than can be shown; else nothing."""
        if len(self._data) > SHOWN_BYTES:
            self._trim()
        text = self._first.decode("utf-8", "replace")
        self._first.clear()
        return text, 0

    def take(self) -> tuple[str, int]:
        if len(self._data) > SHOWN_BYTES:
            self._trim()
        if self._first_left:
            self._first_left = max(0, self._first_left - self._data.count(b"\n"))
        text, skipped = self._decoder.decode(bytes(self._data)), self._skipped
        self._data.clear()
        self._skipped = 0
        return text, skipped

    def _trim(self) -> None:
        """Keep the last lines, and the first ones of the stream; a line longer than all that is shown loses its
        beginning."""
        if self._first_left:
            self._keep_first()
        room = len(self._data) - SHOWN_BYTES
        cut = self._data.find(b"\n", room, len(self._data) - 1) + 1 or room
        self._skipped += self._data.count(b"\n", 0, cut)
        del self._data[:cut]
        self._decoder.reset()

    def _keep_first(self) -> None:
        """Set the first lines of the stream apart, as many as are short."""
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


def write_late(logs: Path, rank: int, event: Wrote) -> None:
    """Log what a thread or process of an earlier run wrote, if its log can still be written; no cell shows it."""
    path = logs / event.run / f"rank{rank}.log"
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, LOG_FLAGS, 0o600)
        with open(fd, "a", encoding="utf-8", errors="backslashreplace") as log:
            if os.fstat(fd).st_size < LOG_LIMIT_BYTES:
                log.write(event.text)


def prune(logs: Path, keep: int = 200) -> None:
    """Delete old logs; those of the newest runs stay, and those that some agent is writing."""
    with suppress(OSError):
        for old in sorted(logs.iterdir(), key=_written_at_s)[:-keep]:
            if not _in_use(old):
                shutil.rmtree(old, ignore_errors=True)


def _written_at_s(run: Path) -> float:
    return max(path.lstat().st_mtime for path in (run, *run.glob("rank*.log")))


def _in_use(run: Path) -> bool:
    """Return whether an agent holds one of a run's logs open: it has a lock on it, see `RunOutput`."""
    for path in run.glob("rank*.log"):
        try:
            with record_file.opened(path) as log:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            continue  # gone this moment, or on a file system without locks
    return False
