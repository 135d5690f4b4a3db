"""Passes large buffers between processes of one machine: written once into anonymous memory, mapped by every reader.

`write` copies buffers into a memfd and returns its file descriptor, which travels over a unix socket; `read` maps it
copy-on-write, so that readers may change the buffers without a copy in advance and without effect on each other. A
reader that reads in steps may get the memory while it is written (`Content.early`, `Arriving`). Any process, any
thread; no state. The memory has no name in a file system, so a crash leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import resource
import shutil
import tempfile
from collections.abc import Callable, Sequence

from jupyter_distrib.errors import PayloadError
from jupyter_distrib.serialization import device_memory
from jupyter_distrib.serialization.mapped_array import mapped_array
from jupyter_distrib.system import open_files
from jupyter_distrib.system.control_groups import free_memory_bytes
from jupyter_distrib.wire.descriptors import Descriptors

ALIGNMENT = 64
"""The alignment of every buffer, in bytes: a cache line, the widest vector register (AVX-512), and the alignment of
torch's own memory. Whole pages (4096) were measured too and gain nothing: 0.23 s for 512 MB either way, and for a
model of 2000 tensors of 1.2 kB 73 instead of 67 ms in 8 instead of 2.5 MB."""

STEP_BYTES = 64 << 20
"""The bytes written per system call: less than the 2 GiB that Linux takes at once, and fast enough (20 ms) for an
interrupt."""
_CHECK_FROM_BYTES = 64 << 20
"""Size from which it is worth 0.1 ms to check the amount of free memory."""
_SEALS = ("F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL")
"""Seals that keep everybody, including the writer, from truncating mapped memory (SIGBUS)."""
_NO_WRITING = (getattr(fcntl, "F_SEAL_WRITE", 0x8), getattr(fcntl, "F_SEAL_FUTURE_WRITE", 0x10))
"""Seals that keep everybody from changing it. The first is refused while a reader of `Content.early` has it mapped."""


def offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return the offsets of buffers of these sizes, and the number of bytes that they take together."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return starts, end


def write(buffers: Sequence[memoryview]) -> int:
    """Copy the buffers into new shared memory. Raises the errors of `Content`.

    Returns:
        A file descriptor, close-on-exec, which the caller closes.
    """
    with Content(buffers) as content:
        content.fill()
        return content.finish()


class Content:
    """The writer's side of buffers on their way into shared memory. Leaving it as a context before `finish` drops it.

    Args:
        buffers: One-dimensional views of bytes.

    Raises:
        PayloadError: There is not enough memory when it is created or filled; the error has the sizes needed and free.
    """

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._buffers = buffers
        self._starts, total = offsets([view.nbytes for view in buffers])
        self._memory = Unfinished(total)
        self._reported, self._report_fd = 0, -1
        """Number of steps reported to the reader, and the descriptor for the reports, or -1."""

    def early(self) -> Descriptors:
        """Return descriptors for an `Arriving`, to be sent before the content is filled; the caller owns them."""
        memory = self._memory.duplicate()
        reading, self._report_fd = os.pipe()
        return Descriptors((memory, reading))

    def fill(self, given_up: Callable[[], bool] = lambda: False) -> bool:
        """Copy the buffers until `given_up` returns True; return whether all were copied."""
        for start, view in zip(self._starts, self._buffers, strict=True):
            read = device_memory.reader_of(view)
            for at in range(0, view.nbytes, STEP_BYTES):
                size_bytes = min(STEP_BYTES, view.nbytes - at)
                piece = view[at : at + size_bytes] if read is None else read(at, size_bytes)
                if given_up():
                    return False
                self._memory.add(piece, start + at)
                self._report((start + at + piece.nbytes) // STEP_BYTES)
        self._report(-(-self._memory.size_bytes // STEP_BYTES))
        return True

    def _report(self, steps: int) -> None:
        if self._report_fd >= 0 and steps > self._reported:
            with contextlib.suppress(BrokenPipeError):  # no reader is left, as the writer notices elsewhere
                os.write(self._report_fd, bytes(steps - self._reported))
            self._reported = steps

    def finish(self) -> int:
        """Return the sealed memory's descriptor; see `Unfinished.finish`."""
        return self._memory.finish()

    def close(self) -> None:
        self._memory.close()
        if self._report_fd >= 0:
            os.close(self._report_fd)
            self._report_fd = -1

    def __enter__(self) -> Content:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class GivenUp(Exception):
    """No more of the content will arrive."""


class Arriving:
    """The reader's side of a content, which waits for its parts.

    Args:
        descriptors: Descriptors of `Content.early`, or that of complete memory; closed at the end of the context.
    """

    def __init__(self, descriptors: Descriptors) -> None:
        self._descriptors = descriptors
        self._memory, *self._report_fd = descriptors
        self.size_bytes = os.fstat(self._memory).st_size
        self._here = 0 if self._report_fd else self.size_bytes
        """The number of bytes that have arrived."""

    def mapped(self) -> mmap.mmap:
        # Before Linux 6.7, sealed memory can only be mapped privately.
        flags = mmap.MAP_SHARED if self._report_fd else mmap.MAP_PRIVATE
        return mmap.mmap(self._memory, self.size_bytes, flags=flags, prot=mmap.PROT_READ)

    def wait(self, end: int) -> None:
        """Wait until everything before `end` has arrived. Raises `GivenUp`."""
        while self._here < min(end, self.size_bytes):
            if not (steps := os.read(self._report_fd[0], 4096)):
                raise GivenUp
            self._here += len(steps) * STEP_BYTES

    def __enter__(self) -> Arriving:
        return self

    def __exit__(self, *_: object) -> None:
        self._descriptors.close()


class Unfinished:
    """Shared memory that is being written. Leaving it as a context before `finish` frees it.

    Raises:
        PayloadError: There is not enough memory when it is created or written to.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._fd = _create(size_bytes)
        try:
            os.ftruncate(self._fd, size_bytes)
        except OSError as error:
            self.close()
            _raise_if_limited(error, size_bytes)
            raise

    def add(self, view: memoryview, start: int) -> None:
        """Write bytes at the offset `start`."""
        try:
            _write_at(self._fd, view, start)
        except OSError as error:
            _raise_if_limited(error, self.size_bytes)
            raise

    def duplicate(self) -> int:
        """Return a further descriptor, which the caller closes."""
        return os.dup(self._fd)

    def finish(self) -> int:
        """Seal the memory, so that nobody can change it, and return its descriptor, which the caller closes."""
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
    """Map memory from `write` and return private, writable views, one per size. The mapping ends with the last of them.

    Args:
        fd: The descriptor; closed in every case.
        sizes: The sizes of the buffers given to `write`.

    Raises:
        PayloadError: The memory is smaller than the sum of the sizes, or cannot be mapped.
    """
    if fd == open_files.LOST:
        raise PayloadError(open_files.advice())
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


def read_places(fds: Sequence[int], sizes: Sequence[int], places: Sequence[tuple[int, int]]) -> list[memoryview]:
    """Map buffers that lie in several memories, and return private, writable views, one per size.

    A memory that is mostly used is mapped as a whole; of other memories, only the used parts are mapped, so that the
    rest is not kept in use. Buffers at the same place are mapped twice: writes to one are not visible in the other.

    Args:
        fds: The descriptors of the memories; closed in every case.
        sizes: The sizes of the buffers.
        places: For each buffer the number of its memory, and its offset there.

    Raises:
        PayloadError: A memory is too small, or cannot be mapped.
    """
    try:
        if open_files.LOST in fds:
            raise PayloadError(open_files.advice())
        wholes = {number: _mapped_whole(fd, number, sizes, places) for number, fd in enumerate(fds)}
        views = []
        for size, (number, start) in zip(sizes, places, strict=True):
            whole = wholes[number]
            views.append(map_part(fds[number], start, size) if whole is None else whole[start : start + size])
    except OSError as error:
        total = _readable(sum(sizes))
        raise PayloadError(f"A payload of {total} cannot be mapped: {error.strerror}.") from error
    finally:
        for fd in fds:
            if fd != open_files.LOST:
                os.close(fd)
    return views


# ------------------------------------------------------------------------------------------------------- writing


def _create(size_bytes: int) -> int:
    """Create a memfd or, without that (macOS) or enough memory, an unlinked file that only this user can open."""
    enough = size_bytes < _CHECK_FROM_BYTES or size_bytes < free_memory_bytes()
    if enough and hasattr(os, "memfd_create"):
        return os.memfd_create("jupyter_distrib", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    directory = _spool_directory()
    if size_bytes >= _CHECK_FROM_BYTES and shutil.disk_usage(directory).free < size_bytes:
        raise _no_room(size_bytes)
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        return os.dup(file.fileno())


def _spool_directory() -> str:
    """Return the folder for large files: /var/tmp is on a disk by convention, /tmp often in memory, which is short."""
    on_disk = "/var/tmp"  # noqa: S108 - no name is made in it
    return on_disk if os.access(on_disk, os.W_OK) else tempfile.gettempdir()


def _write_at(fd: int, view: memoryview, start: int) -> None:
    done = 0
    while done < view.nbytes:
        done += os.pwrite(fd, view[done : done + STEP_BYTES], start + done)


def _seal(fd: int) -> None:
    if hasattr(fcntl, "F_ADD_SEALS"):
        for no_writing in _NO_WRITING:
            with contextlib.suppress(OSError):  # a temporary file cannot be sealed
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, no_writing + sum(getattr(fcntl, name) for name in _SEALS))
                return


def is_sealed(fd: int) -> bool:
    """Return whether nobody can change the memory any more."""
    if not hasattr(fcntl, "F_GET_SEALS"):
        return False
    with contextlib.suppress(OSError):  # a temporary file
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & sum(_NO_WRITING))
    return False


def _raise_if_limited(error: OSError, size_bytes: int) -> None:
    """Raise a `PayloadError` in place of an error that comes from too little memory, or from a limit of the system."""
    if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
        raise _no_room(size_bytes) from error
    if error.errno == errno.EFBIG:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        raise PayloadError(
            f"{_readable(size_bytes)} of data must be handed over, but no file may have more than {_readable(limit)} "
            "(ulimit -f), which holds for shared memory too. Raise the limit with `ulimit -f unlimited` before the "
            "notebook server starts, or hand over less: load large data in the cell itself, and return a summary."
        ) from error


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
    """Map memory copy-on-write, without a descriptor: `mmap.mmap(..., access=ACCESS_COPY)` keeps a duplicate of it for
    the life of the mapping (until `trackfd=False` of Python 3.13), so that a kernel with many results runs out of them.

    MADV_POPULATE_READ was measured and left out: faults around (16 pages) cost as much as it saves (0.06 s for 512 MB).
    """
    return memoryview(mapped_array(size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, fd)).cast("B")


def _mapped_whole(fd: int, number: int, sizes: Sequence[int], places: Sequence[tuple[int, int]]) -> memoryview | None:
    """Return the memory with this number, mapped; None if little of it is used, or some of it twice."""
    used = {place[1]: size for size, place in zip(sizes, places, strict=True) if place[0] == number}
    count = sum(place[0] == number for place in places)
    there = os.fstat(fd).st_size
    if any(start + size > there for start, size in used.items()):
        raise PayloadError(f"A payload of {_readable(sum(used.values()))} arrived incomplete.")
    if len(used) < count or 2 * sum(used.values()) < there:
        return None
    return _map(fd, there) if there else memoryview(bytearray())


def map_part(fd: int, start: int, size_bytes: int, *, reading: bool = False) -> memoryview:
    """Map a part of a memory as `read` does; `reading` promises that all of it is read at once, and nothing written."""
    if not size_bytes:
        return memoryview(bytearray())
    begin = start // mmap.PAGESIZE * mmap.PAGESIZE
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE
    if reading:
        protection, flags = mmap.PROT_READ, flags | getattr(mmap, "MAP_POPULATE", 0)
    whole = memoryview(mapped_array(start - begin + size_bytes, protection, flags, fd, begin)).cast("B")
    return whole[start - begin :]
