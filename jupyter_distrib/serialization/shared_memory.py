"""Large buffers between processes of one machine: written once into anonymous memory, mapped by every reader.

`write` copies buffers into a memfd and returns its file descriptor, which travels over a unix socket; `read` maps it
copy-on-write, so that readers may change what they got without a copy in advance and without seeing each other. A
reader that takes one step after another may have it while it is written (`Content.early`, `Arriving`). Any process, any
thread; no state. Nothing here has a name in a file system, so nothing is left behind by a crash.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence
from functools import cache

from jupyter_distrib.errors import PayloadError
from jupyter_distrib.system.control_groups import free_memory_bytes

ALIGNMENT = 64
"""Every buffer starts at a multiple of this: a cache line, the widest vector register (AVX-512), and what torch aligns
its own memory to. Whole pages (4096) were measured too and gain nothing: 0.23 s for 512 MB either way, and for a
model of 2000 tensors of 1.2 kB 73 instead of 67 ms in 8 instead of 2.5 MB."""

STEP_BYTES = 64 << 20
"""Written per system call: below the 2 GiB that Linux takes at once, and short enough (20 ms) for an interrupt."""
_CHECK_FROM_BYTES = 64 << 20
"""Smaller payloads are not worth the 0.1 ms of asking the system how much memory is free."""
_SEALS = ("F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_WRITE", "F_SEAL_SEAL")
"""Afterwards nobody, not even the writer, can change what others have mapped or truncate it under them (SIGBUS)."""


def offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return where buffers of these sizes lie, and how many bytes they take together."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return starts, end


def write(buffers: Sequence[memoryview]) -> int:
    """Copy the buffers into new shared memory. Raises what `Content` raises.

    Returns:
        A file descriptor, close-on-exec, which the caller closes.
    """
    with Content(buffers) as content:
        content.fill()
        return content.finish()


class Content:
    """Buffers on their way into shared memory. Left as a context before it is finished, it is given up.

    Args:
        buffers: One-dimensional views of bytes.

    Raises:
        PayloadError: When it is made or filled: there is not enough room; says how much is needed and free.
    """

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._buffers = buffers
        self._starts, total = offsets([view.nbytes for view in buffers])
        self._memory = Unfinished(total)
        self._told, self._telling = 0, -1
        """Steps, and where to."""

    def early(self) -> list[int]:
        """Descriptors for an `Arriving`, to be sent before it is filled; the caller closes them."""
        memory = self._memory.duplicate()
        reading, self._telling = os.pipe()
        return [memory, reading]

    def fill(self, given_up: Callable[[], bool] = lambda: False) -> None:
        """Copy the buffers, as long as nobody gives it up."""
        for start, view in zip(self._starts, self._buffers, strict=True):
            for at in range(0, view.nbytes, STEP_BYTES):
                piece = view[at : at + STEP_BYTES]
                if given_up():
                    return
                self._memory.add(piece, start + at)
                self._tell((start + at + piece.nbytes) // STEP_BYTES)
        self._tell(-(-self._memory.size_bytes // STEP_BYTES))

    def _tell(self, steps: int) -> None:
        if self._telling >= 0 and steps > self._told:
            with contextlib.suppress(BrokenPipeError):  # nobody wants it any more, who is heard by another way
                os.write(self._telling, bytes(steps - self._told))
            self._told = steps

    def finish(self) -> int:
        """See `Unfinished.finish`."""
        return self._memory.finish()

    def close(self) -> None:
        self._memory.close()
        if self._telling >= 0:
            os.close(self._telling)
            self._telling = -1

    def __enter__(self) -> Content:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class GivenUp(Exception):
    """There will not be more of a content than is here."""


class Arriving:
    """The reader's side of a content: tells how much of it is there.

    Args:
        fds: As `Content.early` gave them, or the memory alone: then all is there. Taken over.
    """

    def __init__(self, fds: Sequence[int]) -> None:
        self._memory, self._telling = fds[0], fds[1:]
        self.size_bytes = os.fstat(self._memory).st_size
        self._here = 0 if self._telling else self.size_bytes
        """Bytes."""

    def mapped(self) -> mmap.mmap:
        return mmap.mmap(self._memory, self.size_bytes, access=mmap.ACCESS_READ)

    def wait(self, end: int) -> None:
        """Until everything before `end` is there. Raises `GivenUp`."""
        while self._here < min(end, self.size_bytes):
            if not (steps := os.read(self._telling[0], 4096)):
                raise GivenUp
            self._here += len(steps) * STEP_BYTES

    def __enter__(self) -> Arriving:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in (self._memory, *self._telling):
            os.close(fd)


class Unfinished:
    """Shared memory that is being written. Left as a context before it is finished, it is gone.

    Raises:
        PayloadError: When it is made or added to: there is not enough room.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._fd = _create(size_bytes)
        try:
            os.ftruncate(self._fd, size_bytes)
        except OSError:
            self.close()
            raise

    def add(self, view: memoryview, start: int) -> None:
        """Bytes that have their place at `start`."""
        try:
            _write_at(self._fd, view, start)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
                raise _no_room(self.size_bytes) from error
            raise

    def duplicate(self) -> int:
        """Return a descriptor, which the caller closes."""
        return os.dup(self._fd)

    def finish(self) -> int:
        """Its descriptor, which the caller closes. Nobody can change it any more."""
        fd, self._fd = self._fd, -1
        _seal(fd)
        return fd

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Unfinished:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read(fd: int, sizes: Sequence[int]) -> list[memoryview]:
    """Map what `write` wrote: private, writable views, one per size. The mapping ends with the last of them.

    Args:
        fd: Closed in every case.
        sizes: As they were given to `write`.

    Raises:
        PayloadError: The memory is smaller than the sizes say, or cannot be mapped.
    """
    starts, total = offsets(sizes)
    try:
        if os.fstat(fd).st_size < total:
            raise PayloadError(f"A payload of {_readable(total)} arrived incomplete.")
        whole = _map(fd, total) if total else memoryview(bytearray())
    except OSError as error:
        raise PayloadError(f"A payload of {_readable(total)} cannot be mapped: {error.strerror}.") from error
    finally:
        os.close(fd)
    return [whole[start : start + size] for start, size in zip(starts, sizes, strict=True)]


# ------------------------------------------------------------------------------------------------------- writing


def _create(size_bytes: int) -> int:
    """Memory, or, if there is none (macOS) or not enough of it, an unlinked file that only this user can open."""
    enough = size_bytes < _CHECK_FROM_BYTES or size_bytes < free_memory_bytes()
    if enough and hasattr(os, "memfd_create"):
        return os.memfd_create("jupyter_distrib", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    directory = _spool_directory()
    if size_bytes >= _CHECK_FROM_BYTES and shutil.disk_usage(directory).free < size_bytes:
        raise _no_room(size_bytes)
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        return os.dup(file.fileno())


def _spool_directory() -> str:
    """By convention /var/tmp is on a disk, where /tmp often is memory, no help when memory is short."""
    on_disk = "/var/tmp"  # noqa: S108 - no name is made in it
    return on_disk if os.access(on_disk, os.W_OK) else tempfile.gettempdir()


def _write_at(fd: int, view: memoryview, start: int) -> None:
    done = 0
    while done < view.nbytes:
        done += os.pwrite(fd, view[done : done + STEP_BYTES], start + done)


def _seal(fd: int) -> None:
    if hasattr(fcntl, "F_ADD_SEALS"):
        with contextlib.suppress(OSError):  # a temporary file cannot be sealed
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, sum(getattr(fcntl, name) for name in _SEALS))


def _no_room(size_bytes: int) -> PayloadError:
    directory = _spool_directory()
    return PayloadError(
        f"{_readable(size_bytes)} of data must be handed over, but only {_readable(free_memory_bytes())} of memory and "
        f"{_readable(shutil.disk_usage(directory).free)} of {directory} are free. Free some, or hand over less: load "
        "large data in the cell itself, and return a summary."
    )


def _readable(size_bytes: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if size_bytes < 1000:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.1f} GB"


# ------------------------------------------------------------------------------------------------------- reading


def _map(fd: int, size_bytes: int) -> memoryview:
    """Like `mmap.mmap(..., access=ACCESS_COPY)`, which however keeps a duplicate of the descriptor for as long as the
    mapping lives (until `trackfd=False` of Python 3.13), so that a kernel with many results runs out of them.

    MADV_POPULATE_READ was measured and left out: faults around (16 pages) cost as much as it saves (0.06 s for 512 MB).
    """
    libc = _libc()
    address = libc.mmap(None, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, fd, 0)
    if address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    array = (ctypes.c_ubyte * size_bytes).from_address(address)
    # Every view of the array, and every tensor over such a view, keeps the array alive.
    weakref.finalize(array, libc.munmap, address, size_bytes).atexit = False
    return memoryview(array).cast("B")


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int64,  # off_t: 64 bit on every platform that torch supports
    ]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc
