"""Looking at processes from tests: who is alive, who belongs to whom."""

from __future__ import annotations

import os
import re
import select
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from jupyter_distrib.system.reap import AGENT
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.link import Link

_AGENT = re.compile(r"jupyter_distrib\.(agent|pools\.\w+)\b")


def agents(runtime: Path, text: str = "") -> list[int]:
    """Agents and coordinators that serve sockets in this runtime folder, and have this text in their command lines."""
    return [pid for pid, line in _command_lines() if _AGENT.search(line) and str(runtime) in line and text in line]


def marked(text: str) -> list[int]:
    """Processes with a `JUPYTER_DISTRIB_` variable that contains this text in the environment they were exec'd with."""
    found = []
    for pid in _pids():
        with suppress(OSError):
            variables = (Path("/proc") / str(pid) / "environ").read_bytes().decode(errors="replace").split("\0")
            if any(
                v.startswith(("JUPYTER_DISTRIB_GROUP=", "JUPYTER_DISTRIB_WORKER=")) and text in v for v in variables
            ):
                found.append(pid)
    return found


def ranks(runtime: Path, session: str) -> list[int]:
    """Ranks of the agents in this runtime folder, and what they have forked, without those of other kernels.

    A rank is forked, so that its environment in `/proc` is its forkserver's, with the mark of their agent; unlike a
    forkserver it writes into a pipe.
    """
    theirs = {str(pid) for pid in agents(runtime)}
    found = [pid for pid in _pids() if _variable(pid, AGENT).partition(".")[0] in theirs and _writes_into_pipe(pid)]
    others = held_by_others(runtime, session) if found else set()
    return [pid for pid in found if is_alive(pid) and _session(pid) not in others]


def held_by_others(runtime: Path, session: str) -> set[int]:
    """What the agents say of kernels that are there."""
    held: set[int] = set()
    for path in runtime.glob("agent-*.sock"):
        with suppress(OSError, EOFError), socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(10)
            sock.connect(str(path))
            link = Link(sock)
            about = {"session": "asks", "pid": os.getpid(), "label": "", "python": "", "torch": "", "cloudpickle": ""}
            link.send(m.Hello(protocol=m.PROTOCOL, **about))  # type: ignore[arg-type]
            link.send(m.Ask(question=1))
            while not isinstance(answered := link.receive()[0], m.Answered):
                continue
            groups = [group for group in answered.status.groups if group.session != session]
            held |= {worker.pid for group in groups for worker in group.workers}
    return held


def _variable(pid: int, name: str) -> str:
    with suppress(OSError):
        for entry in (Path("/proc") / str(pid) / "environ").read_bytes().decode(errors="replace").split("\0"):
            if entry.startswith(f"{name}="):
                return entry.partition("=")[2]
    return ""


def _writes_into_pipe(pid: int) -> bool:
    with suppress(OSError):
        return os.readlink(f"/proc/{pid}/fd/1").startswith("pipe:")
    return False


def _session(pid: int) -> int:
    with suppress(OSError):
        return os.getsid(pid)
    return 0


def is_alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pids: Iterable[int], limit_s: float = 10.0) -> list[int]:
    """Wait for the end of processes that are not ours; returns those that outlived the limit."""
    deadline = time.monotonic() + limit_s
    left = []
    for pid in pids:
        with suppress(ProcessLookupError):
            fd = os.pidfd_open(pid)
            try:
                if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                    left.append(pid)
            finally:
                os.close(fd)
    return left


def wait_until(condition: Callable[[], object], limit_s: float = 30.0) -> bool:
    """Wait for something that nothing tells of; whether it came within the limit."""
    deadline = time.monotonic() + limit_s
    while not (met := bool(condition())) and time.monotonic() < deadline:
        time.sleep(0.02)
    return met


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _command_lines() -> list[tuple[int, str]]:
    out = []
    for pid in _pids():
        with suppress(OSError):
            out.append(
                (pid, (Path("/proc") / str(pid) / "cmdline").read_bytes().decode(errors="replace").replace("\0", " "))
            )
    return out


def tree(pid: int) -> list[int]:
    """A process and everything below it."""
    out = [pid]
    with suppress(OSError):
        for task in (Path("/proc") / str(pid) / "task").iterdir():
            for child in (task / "children").read_text().split():
                out += tree(int(child))
    return out


def listeners(pids: list[int]) -> set[str]:
    """Addresses on which these processes listen for TCP connections."""
    owned = set()
    for pid in pids:
        with suppress(OSError):
            for fd in (Path("/proc") / str(pid) / "fd").iterdir():
                with suppress(OSError):
                    owned.add(os.readlink(fd))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in (Path("/proc/net") / table).read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and f"socket:[{columns[9]}]" in owned:
                found.add(columns[1])
    return found
