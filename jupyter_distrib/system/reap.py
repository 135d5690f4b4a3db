"""Ends processes that this agent's ranks started, and nothing else. Reads /proc on Linux; elsewhere only process groups
are ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from jupyter_distrib.system.confinement import pid_namespace
from jupyter_distrib.system.event_loop import Loop
from jupyter_distrib.system.launch import AGENT, began

WORKER = "JUPYTER_DISTRIB_WORKER"
"""Variable that marks everything a rank starts, whatever session it is in."""
_PROC = Path("/proc")
_SWEEPS = 3
"""Number of sweeps: processes may have started others just before they were killed."""


class Sweep:
    """Ends what ranks have left running: one scan of all processes for ranks that end together."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._sessions: set[int] = set()
        self._marks: set[str] = set()

    def add(self, pid: int, mark: str) -> None:
        """Kill the processes that an ended rank leaves: its process group, its session, and everything that carries
        its mark. The group is killed now, the rest once the loop has handled all pending events."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        if not self._sessions:
            self._loop.soon(self._kill)
        self._sessions.add(pid)
        self._marks.add(mark)

    def _kill(self) -> None:
        kill_left(self._sessions, self._marks)
        self._sessions, self._marks = set(), set()


def kill_left(sessions: Collection[int], marks: Collection[str]) -> None:
    """Kill the processes of these sessions, and any that were exec'd with one of these marks in their environment."""
    for pid in _others(lambda pid: _session(pid) in sessions or mark_of(pid, WORKER) in marks):
        _kill(pid)


def kill_adopted(known: frozenset[int], belongs_to_living: Callable[[int], bool]) -> None:
    """Kill children that were adopted because their own parent, a dead rank, has ended."""
    for pid in children(os.getpid()):
        if pid not in known and not belongs_to_living(pid):
            _kill(pid)


def kill_orphans() -> None:
    """Kill the remains of killed agents: everything that carries the mark of a dead agent."""
    for _ in range(_SWEEPS):
        orphans = _others(_is_orphan)
        for pid in orphans:
            _kill(pid)
        if not orphans:
            return


def _is_orphan(pid: int) -> bool:
    """Return whether the agent of a process is gone. Processes of a container have numbers and times of their own, and
    agents that cannot be seen from outside."""
    agent, _, since = (mark_of(pid, AGENT) or "").partition(".")
    return agent.isdecimal() and began(int(agent)) != since and pid_namespace(pid) == pid_namespace()


def children(pid: int) -> list[int]:
    """Return the direct children of a process."""
    found: list[int] = []
    with suppress(OSError):
        for task in os.listdir(f"{_PROC}/{pid}/task"):
            with open(f"{_PROC}/{pid}/task/{task}/children") as file:
                found += map(int, file.read().split())
    return found


def session_of(pid: int) -> int:
    """Return the session a process belongs to; 0 if it is gone."""
    return _session(pid)


def mark_of(pid: int, name: str) -> str | None:
    """Return a variable of the environment that a process was exec'd with; empty if it has none. None if it shows no
    environment at all, as do all processes at the moment of their exec, and few others."""
    environment = _environment(pid)
    _, found, rest = (b"\0" + environment).partition(f"\0{name}=".encode())
    if found:
        return rest.partition(b"\0")[0].decode("utf-8", "replace")
    return "" if environment else None


def rss_bytes(pid: int) -> int:
    """Return the resident memory of a process; 0 if it is gone."""
    with suppress(OSError, ValueError, IndexError):
        return int((_PROC / str(pid) / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def sockets_between(pids: list[int]) -> tuple[int, ...]:
    """Return the inodes of connected TCP sockets both of whose ends belong to these processes: their collectives and
    their store.

    A user's own connections, to a database or a tracking server, have another process at the other end and are left
    alone.
    """
    ends = _connections(pids)
    return tuple(inode for (local, remote), inode in ends.items() if (remote, local) in ends)


def ends_outside(pids: list[int]) -> tuple[tuple[str, str], ...]:
    """Return the local and remote addresses of these processes' connections to processes outside of them."""
    ends = _connections(pids)
    return tuple((local, remote) for local, remote in ends if (remote, local) not in ends)


def sockets_towards(pids: list[int], ends: Iterable[tuple[str, str]]) -> tuple[int, ...]:
    """Return the inodes of these processes' connections whose other ends were found by `ends_outside` on another
    node."""
    found = _connections(pids)
    return tuple(found[remote, local] for local, remote in ends if (remote, local) in found)


def _connections(pids: list[int]) -> dict[tuple[str, str], int]:
    """Return the inodes of the connected TCP sockets of these processes, by local and remote address."""
    owned = {inode for pid in pids for inode in _socket_inodes(pid)}
    ends: dict[tuple[str, str], int] = {}
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (_PROC / "net" / table).read_text().splitlines()[1:]:
                local, remote, state, inode = _tcp_row(line)
                if state == "01" and inode in owned:  # 01: established
                    ends[_mapped(local), _mapped(remote)] = inode
    return ends


def _tcp_row(line: str) -> tuple[str, str, str, int]:
    columns = line.split()
    return columns[1], columns[2], columns[3], int(columns[9])


def _mapped(address: str) -> str:
    """Map an IPv4 address inside IPv6 (proc_net_tcp: 32 hex digits) to the plain one, which is the same end."""
    host, _, port = address.partition(":")
    return f"{host[-8:] if host.startswith('0000000000000000FFFF0000') else host}:{port}"


def _socket_inodes(pid: int) -> Iterator[int]:
    with suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
                if target.startswith("socket:["):
                    yield int(target[8:-1])


def _others(chosen: Callable[[int], bool]) -> list[int]:
    with suppress(OSError):
        return [pid for pid in map(int, filter(str.isdigit, os.listdir(_PROC))) if pid != os.getpid() and chosen(pid)]
    return []


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return 0


def _environment(pid: int) -> bytes:
    """Return the environment that a process was exec'd with; read without a `Path` and a file object, since all
    processes of the machine are looked at whenever ranks end."""
    parts = []
    with suppress(OSError):
        descriptor = os.open(f"/proc/{pid}/environ", os.O_RDONLY | os.O_CLOEXEC)
        try:
            while part := os.read(descriptor, 1 << 16):
                parts.append(part)
        finally:
            os.close(descriptor)
    return b"".join(parts)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
