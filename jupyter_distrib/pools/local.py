"""Ranks on this machine: an agent that the user's kernels share, found by what must be equal between them.

The kernel binds the agent's socket and hands it over, so that it can connect at once and nobody waits for a port or a
file to appear. One thread writes to the agent and one reads from it; an interrupt, which Python raises in the main
thread, never cuts a frame in two.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import os
import queue
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from jupyter_distrib import paths
from jupyter_distrib.errors import PoolError
from jupyter_distrib.events import PROTOCOL, Command, Hello
from jupyter_distrib.link import Link, peer_uid
from jupyter_distrib.pools import Lost, Sink

LOAD_TIME = (
    "LD_",
    "DYLD_",
    "PYTHON",
    "OMP_",
    "MKL_",
    "KMP_",
    "OPENBLAS_",
    "MALLOC_",
    "GLIBC_",
    "TORCH_",
    "NCCL_",
    "CUDA_",
    "JUPYTER_DISTRIB_",
)
"""Variables that programs and libraries read when they load: kernels that differ in one get an agent of their own."""
NOT_LOAD_TIME = ("CUDA_VISIBLE_DEVICES", "PYTHONSTARTUP", "PYDEVD", "PYTHONBREAKPOINT", "PYTEST")


class LocalPool:
    """This machine."""

    kind = "local"

    def connect(self, hello: Hello, sink: Sink, lost: Lost) -> LocalNode:
        if sys.platform == "win32":
            raise PoolError("jupyter_distrib does not run on Windows itself; run JupyterLab inside WSL.")
        sock = _connect()
        if peer_uid(sock) not in (None, os.getuid()):
            raise PoolError("the agent's socket belongs to another user; remove it and try again.")
        node = LocalNode(Link(sock), sink, lost)
        node.send(hello)
        return node


class LocalNode:
    """The link to this machine's agent, and its two threads."""

    def __init__(self, link: Link, sink: Sink, lost: Lost) -> None:
        self._link, self._sink, self._lost = link, sink, lost
        self._outbox: queue.SimpleQueue[tuple[Command, Sequence[int]] | None] = queue.SimpleQueue()
        self._closed = False
        for name, target in (("write", self._write), ("read", self._read)):
            threading.Thread(target=target, name=f"jupyter_distrib-{name}", daemon=True).start()

    def send(self, command: Command, fds: Sequence[int] = ()) -> None:
        self._outbox.put((command, fds))

    def close(self) -> None:
        self._closed = True
        self._outbox.put(None)

    def _write(self) -> None:
        while (entry := self._outbox.get()) is not None:
            command, fds = entry
            with suppress(OSError):  # the reader notices that the agent is gone, and says so
                self._link.send(command, fds)
            for fd in fds:
                os.close(fd)
        with suppress(OSError):
            self._link.sock.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        while True:
            try:
                event, fds = self._link.receive()
            except (EOFError, OSError):
                break
            self._sink(event, fds)  # type: ignore[arg-type]
        self._link.close()
        if not self._closed:
            self._lost("the agent that looks after the ranks has ended")


def fingerprint() -> str:
    """Names what an agent and its kernels must have in common."""
    parts = [
        PROTOCOL,
        sys.executable,
        sys.prefix,
        sys.version,
        _version("torch"),
        _version("cloudpickle"),
        *_sources(),
        *sorted(_load_time_environment()),
        *(
            resource.getrlimit(getattr(resource, name))
            for name in ("RLIMIT_NOFILE", "RLIMIT_AS", "RLIMIT_CORE", "RLIMIT_MEMLOCK")
        ),
        sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else "",
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def load_time_changes(env: dict[str, str]) -> dict[str, str]:
    """Those of the variables that a forked rank would read too late."""
    return {name: value for name, value in env.items() if _is_load_time(name) and os.environ.get(name) != value}


def _is_load_time(name: str) -> bool:
    return name.startswith(LOAD_TIME) and not name.startswith(NOT_LOAD_TIME)


def _load_time_environment() -> Iterator[str]:
    return (f"{name}={value}" for name, value in os.environ.items() if _is_load_time(name))


def _sources() -> Iterator[str]:
    root = Path(__file__).parent.parent
    for path in sorted(root.rglob("*.py")):
        info = path.stat()
        yield f"{path}:{info.st_mtime_ns}:{info.st_size}"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _connect() -> socket.socket:
    directory = paths.runtime_directory()
    name = f"agent-{fingerprint()}"
    path = directory / f"{name}.sock"
    if len(str(path)) > paths.SOCKET_PATH_LIMIT:
        raise PoolError(f"{path} is too long for a socket; set JUPYTER_DISTRIB_RUNTIME_DIR to a shorter folder.")
    if (sock := _try(path)) is not None:
        return sock
    with (directory / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (sock := _try(path)) is not None:
            return sock
        _start_agent(path, directory, name)
        if (sock := _try(path)) is not None:
            return sock
    raise PoolError(f"the agent could not be started; see {directory / f'{name}.log'}.")


def _try(path: Path) -> socket.socket | None:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(str(path))
    except OSError:
        sock.close()
        return None
    return sock


def _start_agent(path: Path, directory: Path, name: str) -> None:
    """Exec the agent, in a session of its own so that the kernel's signals do not reach it; it inherits the bound
    socket."""
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, (directory / f"{name}.log").open("wb") as log:
        listener.bind(str(path))
        listener.listen(64)
        fd = listener.fileno()
        command = [sys.executable, "-m", "jupyter_distrib.agent", str(fd), str(directory), name]
        process = subprocess.Popen(
            command,
            pass_fds=[fd],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
            env=_agent_environment(),
        )
    # It usually outlives this kernel; if not, it must not stay a zombie.
    threading.Thread(target=process.wait, name="jupyter_distrib-agent", daemon=True).start()


def _agent_environment() -> dict[str, str]:
    """The kernel's environment, with this package importable from anywhere, also from a source folder."""
    root = str(Path(__file__).parent.parent.parent)
    before = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": root if not before else f"{root}{os.pathsep}{before}",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
