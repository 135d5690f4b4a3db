"""Changes the standing of this process in the system: its parent, session, standard streams and sockets."""

from __future__ import annotations

import atexit
import ctypes
import errno
import faulthandler
import io
import os
import resource
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from typing import Any, NoReturn

_LIMITS = "ulimit -u, or the pids.max of a container"
if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
    _LIMITS = f"ulimit -v, which limits its memory; {_LIMITS}"
TOO_MANY_PROCESSES = f"this user may not start more processes ({_LIMITS}): raise the limit"
"""The reason for EAGAIN from fork(2) and clone(2), with advice, for use in a sentence."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_MADV_COLLAPSE = 25
_HUGE_BYTES = 1 << 21
_IOLBF = 1


def why_not_started(program: str, error: OSError) -> str:
    """Return why a program could not be started. Python says that of a missing one that permission is denied, if PATH
    has a folder that this user may not look into (`subprocess`, and execvp(3))."""
    there = [os.path.join(folder, program) for folder in os.get_exec_path()]
    is_missing = isinstance(error, PermissionError) and os.sep not in program and not any(map(os.path.lexists, there))
    return os.strerror(errno.ENOENT) if is_missing else str(error.strerror)


def die_with_parent(parent_pid: int) -> None:
    """Have the system kill this process when `parent_pid` ends (prctl(2); Linux only, elsewhere nothing happens).

    Waits until that process is the parent: a forked rank is handed on to it a moment after the fork.
    """
    if sys.platform != "linux":
        return
    while os.getppid() != parent_pid:
        if not is_alive(parent_pid):
            os._exit(1)
        time.sleep(0.0002)
    _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


def is_alive(pid: int) -> bool:
    """Return whether a process lives; a zombie, which its own parent has not waited for, does not."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except (OSError, IndexError):
        return False


def address_space_bytes() -> int:
    """Return the size of this process's address space, which RLIMIT_AS limits; 0 where the system does not tell."""
    with suppress(OSError, ValueError, IndexError), open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
    return 0


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal; False if unknown."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:  # a process may have any name
            return file.read().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


def state_and_cpu_s(pid: int) -> tuple[str, float]:
    """Return the state of a process ("R": executes, or waits for a CPU) and the CPU time in s that it has had, in steps
    of 10 ms; "" and 0 if it has ended, or the system does not tell.

    Source: proc_pid_stat(5), fields `state` (of the main thread), `utime` and `stime`.
    """
    with suppress(OSError, IndexError, ValueError), open(f"/proc/{pid}/stat", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
        return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return "", 0.0


def become_subreaper() -> None:
    """Become the parent of descendants whose own parent ends (Linux only)."""
    if sys.platform == "linux":
        _libc().prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def fork_orphan() -> int:
    """Fork a child whose parent is at once our own parent (or the next subreaper); returns 0 in it, else 1."""
    helper = os.fork()
    if helper == 0:
        if os.fork() == 0:
            return 0
        os._exit(0)
    os.waitpid(helper, 0)
    return 1


def gather_memory() -> None:
    """Have the system put this process's own memory into huge pages, so that a fork takes a fifth of the time: there is
    less to copy than with a table entry for every 4 KB.

    madvise(2), MADV_COLLAPSE: since Linux 6.1; elsewhere nothing happens.
    """
    if sys.platform != "linux":
        return
    with open("/proc/self/maps") as file:
        maps = [line.split() for line in file]
    for span, access, _, _, inode, *name in maps:
        begin, end = (int(part, 16) // _HUGE_BYTES * _HUGE_BYTES for part in span.split("-"))
        begin += _HUGE_BYTES
        if access == "rw-p" and inode == "0" and name in ([], ["[heap]"]) and begin < end:
            _libc().madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_COLLAPSE)


def redirect_streams(stdout_fd: int, stderr_fd: int) -> None:
    """Use the two descriptors as this process's standard output and error, for Python, C and children alike."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(stdout_fd, 1)
    os.dup2(stderr_fd, 2)
    for fd in {null, stdout_fd, stderr_fd} - {0, 1, 2}:
        os.close(fd)
    # typeshed declares the names with underscores as final; here they are to be ours as well.
    _streams[:] = _NoInput(), _text(1), _text(2)
    restore_python_streams()
    _note_descriptors()
    _line_buffer_c_stdout()
    report_crashes()
    # A child that is forked in the middle of a flush would have its streams locked for ever.
    os.register_at_fork(before=_flushing.acquire, after_in_parent=_flushing.release, after_in_child=_flushing.release)


def report_crashes() -> None:
    """Have a crash of this process write the place of its main thread to standard error."""
    faulthandler.enable(file=2, all_threads=False)


_streams: list[Any] = []
"""Python's standard streams of this process, in the order of their descriptors."""
_opened: list[tuple[int, int]] = []
"""The files behind the first three descriptors (`st_dev`, `st_ino`)."""
STREAM_NAMES = ("stdin", "stdout", "stderr")
_FORM: dict[str, Any] = {"encoding": "utf-8", "errors": "backslashreplace", "line_buffering": True}
"""The settings of a standard stream for text."""


def restore_python_streams() -> None:
    """Give `sys` this process's own streams back, as they were, and open those anew that user code has closed."""
    for fd, name in enumerate(STREAM_NAMES):
        if fd and _is_closed(_streams[fd]):
            _streams[fd] = _text(fd)
        elif fd and any(getattr(_streams[fd], key) != value for key, value in _FORM.items()):
            _streams[fd].reconfigure(**_FORM)
        setattr(sys, name, _streams[fd])
        setattr(sys, f"__{name}__", _streams[fd])


def lost_descriptors() -> list[int]:
    """Return which of the first three descriptors user code has closed or redirected; costs a microsecond each."""
    return [fd for fd, opened in enumerate(_opened) if identity(fd) != opened]


def restore_input() -> None:
    """Have descriptor 0 read nothing again, and 1 and 2 be open, so that no other file gets their numbers."""
    while (null := os.open(os.devnull, os.O_RDWR)) < len(STREAM_NAMES):
        os.set_inheritable(null, True)
    os.dup2(null, 0)
    os.close(null)
    _opened[0] = identity(0)


def is_socket(fd: int) -> bool:
    """Return whether a descriptor is open, and a socket."""
    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:
        return False


def _note_descriptors() -> None:
    _opened[:] = [identity(fd) for fd in range(len(STREAM_NAMES))]


def identity(fd: int) -> tuple[int, int]:
    """Return which file a descriptor is (`st_dev`, `st_ino`); zeros if it is closed."""
    try:
        found = os.fstat(fd)
    except OSError:
        return 0, 0
    return found.st_dev, found.st_ino


def _is_closed(stream: Any) -> bool:
    try:
        return bool(stream.closed)
    except ValueError:  # detached
        return True


def has_children() -> bool:
    """Return whether children of this process live, or have not been waited for; costs a microsecond."""
    if not hasattr(os, "waitid"):
        return False
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def renew_streams() -> list[int]:
    """Open new pipes as standard output and error; children keep the old ones. Return the ends to read from.

    Raises:
        OSError: Too many files are open; the streams are as they were.
    """
    first = os.pipe()
    try:
        pipes = (first, os.pipe())
    except OSError:
        for fd in first:
            os.close(fd)
        raise
    for fd, (_, write_fd) in enumerate(pipes, start=1):
        os.dup2(write_fd, fd)
        os.close(write_fd)
    _note_descriptors()
    return [read_fd for read_fd, _ in pipes]


_flushing = threading.Lock()


def flush_unfinished() -> None:
    """Flush the buffers of Python and of C's stdout, which hold unfinished lines. Any thread; costs microseconds if
    there is nothing."""
    with _flushing:
        _flush(sys.__stdout__, sys.__stderr__)
    if (stdout := _c_stdout()) is not None:
        _libc().fflush(stdout)


def flush_streams() -> None:
    """Flush the buffers of Python and C."""
    with _flushing:
        _flush(sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    _libc().fflush(None)


def leave() -> NoReturn:
    """Run the exit handlers and end, without waiting for threads or for C++ destructors that may hang or abort."""
    try:
        atexit._run_exitfuncs()  # noqa: SLF001
        flush_streams()
    finally:
        os._exit(0)


def _flush(*streams: Any) -> None:
    for stream in streams:
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            continue  # the cell may have closed or replaced it


def _text(fd: int) -> io.TextIOWrapper:
    return io.TextIOWrapper(
        open(fd, "wb", buffering=io.DEFAULT_BUFFER_SIZE, closefd=False),
        **_FORM,
    )


NO_KEYBOARD = (
    "a rank has no keyboard: input() does not work under %%distributed, nor a debugger other than breakpoint() and "
    "pdb.set_trace(). Ask in an earlier cell and use the value here, or run this cell with --pool inline."
)


class _NoInput(io.TextIOBase):
    """The standard input of a rank: it cannot be typed into, and a prompt must not hang."""

    def readable(self) -> bool:
        return True

    def readline(self, size: int = -1) -> str:  # type: ignore[override]
        raise EOFError(NO_KEYBOARD)

    read = readline  # type: ignore[assignment]

    def close(self) -> None:
        """Stay open: `exit()` closes it, and the rank has later cells."""


def _line_buffer_c_stdout() -> None:
    """Buffer C's stdout by lines: on a pipe it holds back 4 KB, and the output of a C library should appear at once
    too."""
    if (stdout := _c_stdout()) is not None:
        _libc().setvbuf(stdout, None, _IOLBF, ctypes.c_size_t(0))


@cache
def _c_stdout() -> ctypes.c_void_p | None:
    """Return C's stdout; None outside glibc and musl, which have no such symbol."""
    try:
        return ctypes.c_void_p.in_dll(_libc(), "stdout")
    except ValueError:
        return None


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def shut_sockets(inodes: frozenset[int]) -> None:
    """Shut down this process's connected sockets with these inodes; a collective that waits on one returns with an
    error."""
    for fd in _open_descriptors() if inodes else ():
        try:
            info = os.fstat(fd)
            if stat.S_ISSOCK(info.st_mode) and info.st_ino in inodes:
                sock = socket.socket(fileno=fd)  # without a duplicate, for which there may be no room
                try:
                    sock.shutdown(socket.SHUT_RDWR)
                finally:
                    sock.detach()
        except OSError:
            continue  # closed meanwhile, or no longer connected


def _open_descriptors() -> Iterable[int]:
    """Return the numbers of the open descriptors; if no more can be opened to look, all numbers that may be open."""
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return range(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
