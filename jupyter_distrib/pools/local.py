"""Ranks on this machine: an agent that the user's kernels share, found by a fingerprint of what must be equal.

The kernel binds the agent's socket and hands it over, so that it can connect at once and nobody waits for a port or a
file to appear. Each thread sends its commands itself; one thread reads the agent's events. An interrupt, which Python
raises in the main thread, never cuts a frame in two.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import resource
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from jupyter_distrib.errors import PoolError
from jupyter_distrib.options import Option
from jupyter_distrib.pools.base import IDLE, PACKAGES, PYTHON, Capabilities, Lost, Sink
from jupyter_distrib.system import interrupts, paths, process_environment, reap
from jupyter_distrib.system.launch import exec_agent
from jupyter_distrib.wire.descriptors import NO_DESCRIPTORS, Descriptors
from jupyter_distrib.wire.link import Link, encode, peer_uid
from jupyter_distrib.wire.messages import PROTOCOL, Command, Hello, Welcomed

GPU_LOAD_TIME = (
    "CUBLAS_",
    "CUDA_",
    "CUDNN_",
    "NCCL_",
    "NVIDIA_",
    "NVTE_",
    "PYTORCH_",
    "TORCH_",
    "TRITON_",
)
"""Variables that CUDA, its libraries and torch read once in a process."""
SET_BY_LIBRARIES = ("CUDA_DEVICE_ORDER", "CUDA_MODULE_LOADING", "CUDA_VISIBLE_DEVICES", "TRITON_CACHE_DIR")
"""Variables among them that libraries set by themselves, or that other code handles."""
LOAD_TIME = (
    *GPU_LOAD_TIME,
    "LD_",
    "DYLD_",
    "PYTHON",
    "OMP_",
    "MKL_",
    "KMP_",
    "OPENBLAS_",
    "MALLOC_",
    "GLIBC_",
    "JUPYTER_DISTRIB_",
)
"""Variables that programs and libraries read when they load: kernels that differ in one get separate agents."""
NOT_LOAD_TIME = (
    "CUDA_VISIBLE_DEVICES",
    "PYTHONSTARTUP",
    "PYDEVD",
    "PYTHONBREAKPOINT",
    "PYTEST",
    "JUPYTER_DISTRIB_POOL",
    "JUPYTER_DISTRIB_STRATEGY",
    "JUPYTER_DISTRIB_CONFIG",
)

AGENT_NAME = "agent"
"""The beginning of the names of local agents' sockets; other kinds of pools use their own."""
DEFAULT_IDLE_S = 1800.0
ENDING_S = 5.0
"""Seconds to wait for the end of an agent that is being killed: it closes its links a moment before."""


class LocalPool:
    """The pool of this machine.

    Args:
        python: The interpreter that agent and ranks run under; empty: the kernel's own.
        idle: Seconds after which idle ranks that keep nothing give their GPUs back; empty: half an hour.
    """

    kind = "local"
    options: ClassVar = (PYTHON, IDLE, *PACKAGES)
    capabilities: ClassVar = Capabilities(remote=False)

    def __init__(self, python: str = "", idle: str = "") -> None:
        self._python, self._idle_s = python, float(idle or DEFAULT_IDLE_S)

    def connect(self, hello: Hello, sink: Sink, lost: Lost) -> LocalNode:
        if sys.platform == "win32":
            raise PoolError("jupyter_distrib does not run on Windows itself; run JupyterLab inside WSL.")
        home = Home.of(self._python)
        hello = replace(hello, idle_s=self._idle_s)
        return greeted(home.reach(), hello, sink, lambda reason: lost(home.explained(reason)))


class RunningServer:
    """An agent or coordinator that already runs, whatever it was started with.

    Args:
        name: The name of its socket.
    """

    kind = ""
    options: ClassVar[tuple[Option, ...]] = ()
    capabilities: ClassVar = Capabilities()

    def __init__(self, name: str) -> None:
        self._name = name

    def connect(self, hello: Hello, sink: Sink, lost: Lost) -> LocalNode:
        if (sock := _try(paths.runtime_directory() / f"{self._name}.sock")) is None:
            raise PoolError(
                "the process that holds the detached run accepts no connection, so the run cannot be shown here."
            )
        return greeted(sock, hello, sink, lost)


def greeted(sock: socket.socket, hello: Hello, sink: Sink, lost: Lost) -> LocalNode:
    """Say hello on a new connection. Raises `PoolError`."""
    if peer_uid(sock) not in (None, os.getuid()):
        sock.close()
        raise PoolError(f"the agent's socket {sock.getpeername()} belongs to another user; remove it and try again.")
    node = LocalNode(Link(sock), sink, lost)
    node.send(hello)
    return node


class LocalNode:
    """The link to this machine's agent. A thread receives its events."""

    def __init__(self, link: Link, sink: Sink, lost: Lost) -> None:
        self._link, self._sink, self._lost = link, sink, lost
        self._sending = threading.Lock()
        self._draining = False
        self._closed = False
        self._pid = 0
        """The agent's process, once it has answered."""
        self._end: select.poll | None = None
        """The poll for the end of the agent's process, once the agent has answered."""
        threading.Thread(target=self._read, name="jupyter_distrib-read", daemon=True).start()

    def send(self, command: Command, descriptors: Descriptors = NO_DESCRIPTORS) -> None:
        """Send a command at once, as far as the socket takes it; a thread sends the rest."""
        frame = encode(command, len(descriptors))
        with interrupts.Uninterrupted(), self._sending, descriptors:
            if self._link.fileno() >= 0:
                self._link.post(frame, tuple(descriptors))
                self._flush()

    def has_ended(self) -> bool:
        """Return whether the agent's process has ended, also if the end of its link has not been read yet."""
        end = self._end
        return end is not None and bool(end.poll(0))

    def close(self) -> None:
        with interrupts.Uninterrupted(), self._sending:
            self._closed = True
            self._flush()

    def give_up(self, ranks: Sequence[int]) -> None:
        """Close the link to an agent that does not answer, so that the next cell gets another one: its name is given
        up, and its ranks with these pids are killed, which it does not do."""
        with suppress(OSError, TypeError):
            Path(self._link.sock.getpeername()).unlink()
        for pid in set(ranks).intersection(reap.children(self._pid) if self._pid else ()):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self.close()

    def _flush(self) -> None:
        """Send what the socket takes. Called with `_sending` held; does nothing while `_drain` runs."""
        if self._draining:
            return
        with suppress(OSError):  # the reader notices that the agent is gone, and says so
            self._link.flush()
            if self._link.unsent:
                self._draining = True
                threading.Thread(target=self._drain, name="jupyter_distrib-write", daemon=True).start()
            elif self._closed:
                self._link.sock.shutdown(socket.SHUT_RDWR)

    def _drain(self) -> None:
        """Send the rest, in a thread, to an agent that reads more slowly than commands come."""
        poll = select.poll()
        poll.register(self._link.sock, select.POLLOUT)
        while self._draining:
            poll.poll()
            with self._sending:
                self._draining = False
                with suppress(OSError):
                    self._link.flush()
                    self._draining = self._link.unsent
        with self._sending:
            self._flush()

    def _read(self) -> None:
        agent, reason = -1, "the agent that looks after the ranks has ended"
        while True:
            try:
                event, fds = self._link.receive()
            except (EOFError, OSError):
                break
            if isinstance(event, Welcomed):
                agent, self._pid = _opened(event.pid), event.pid
                self._end = _watching(agent)
            try:
                self._sink(event, Descriptors(fds) if fds else NO_DESCRIPTORS)  # type: ignore[arg-type]
            except Exception as error:  # noqa: BLE001 - who waits for a run must hear of its end whatever breaks here
                traceback.print_exc()
                reason = f"the notebook failed at an event of its ranks ({type(error).__name__}: {error})"
                break
        with self._sending:
            self._link.close()
        given_up = self._closed
        if not given_up:
            self._lost(reason)
        self._end = None  # not earlier: a cell that begins now has to see that the agent has ended
        if not given_up:
            _sweep(agent)
        if agent >= 0:
            os.close(agent)


def _opened(pid: int) -> int:
    """Open a descriptor that becomes readable when the process ends; return -1 where the system has no such
    descriptors."""
    with suppress(OSError, AttributeError):
        return os.pidfd_open(pid)
    return -1


def _sweep(agent: int) -> None:
    """Wait for the agent's end, then end what its ranks had started: the ranks themselves have ended with it."""
    if (end := _watching(agent)) is not None and end.poll(ENDING_S * 1000):
        reap.kill_orphans()


def _watching(agent: int) -> select.poll | None:
    """Return a poll for the end of the agent; None where the system has no descriptors of processes."""
    if agent < 0:
        return None
    poll = select.poll()
    poll.register(agent, select.POLLIN)
    return poll


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """The location of an agent, and the way to start it."""

    name: str
    python: str = ""
    """Interpreter of the agent; empty: the kernel's own."""
    module: str = "jupyter_distrib.agent"
    told: str = field(default="", repr=False)
    """Text for its standard input; it may contain keys."""

    @classmethod
    def of(cls, python: str) -> Home:
        """Return the home of the agent for an interpreter. Raises `PoolError` if the interpreter does not exist."""
        if not python:
            return cls(name=f"{AGENT_NAME}-{fingerprint()}")
        path = os.path.abspath(os.path.expanduser(python))
        if not os.access(path, os.X_OK) or os.path.isdir(path):
            raise PoolError(f"there is no interpreter at {path}: give --python that of an environment with torch.")
        info = os.stat(path)
        return cls(python=path, name=f"{AGENT_NAME}-{fingerprint(path, info.st_mtime_ns, info.st_size)}")

    @property
    def log(self) -> Path:
        return paths.runtime_directory() / f"{self.name}.log"

    def reach(self) -> socket.socket:
        """Return a connection to the agent, and start it if need be. Raises `PoolError`."""
        directory = paths.runtime_directory()
        path = directory / f"{self.name}.sock"
        if len(str(path)) > paths.SOCKET_PATH_LIMIT:
            raise PoolError(
                f"{path} is too long for a socket; set JUPYTER_DISTRIB_RUNTIME_DIR to a folder with a shorter path."
            )
        if (sock := _try(path)) is not None:
            return sock
        try:
            with paths.opened(directory / f"{self.name}.lock") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if (sock := _try(path)) is not None:
                    return sock
                self._start(path, directory)
                if (sock := _try(path)) is not None:
                    return sock
        except OSError as error:
            raise PoolError(self._not_started(error)) from error
        raise PoolError(f"the agent could not be started; see {self.log}.")

    def _not_started(self, error: OSError) -> str:
        if not os.access(python := self.python or sys.executable, os.X_OK):
            return f"there is no interpreter at {python} any more: make its environment again, or restart the kernel."
        place = f"{error.filename} is in the way ({error.strerror}): remove it" if error.filename else error.strerror
        return f"the agent could not be started: {place}."

    def _start(self, path: Path, directory: Path) -> None:
        path.unlink(missing_ok=True)
        arguments = (self.module, str(directory), self.name)
        env, python = self._environment(directory), self.python or sys.executable
        with paths.opened(self.log) as log:
            process = exec_agent(str(path), log, arguments, env, python, told=self.told)
        # It usually outlives this kernel; if not, it must not stay a zombie.
        threading.Thread(target=process.wait, name="jupyter_distrib-agent", daemon=True).start()

    def _environment(self, directory: Path) -> dict[str, str]:
        """Return the kernel's environment, with this package importable from anywhere, also from a source folder."""
        root = Path(__file__).parent.parent.parent
        if self.python or _is_lower_layer(root):
            root = _alone(directory)
        before = os.environ.get("PYTHONPATH")
        return {
            **os.environ,
            "PYTHONPATH": str(root) if not before else f"{root}{os.pathsep}{before}",
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        }

    def explained(self, reason: str) -> str:
        """Return the reason why the agent has ended, with the last output of an agent under another interpreter."""
        if not self.python:
            return reason
        with suppress(OSError):
            if lines := self.log.read_text("utf-8", "replace").split("\n")[-8:]:
                last = " ".join(filter(None, map(str.strip, lines[-2:])))
                return f"{reason}; under {self.python} it said: {last}" if last else reason
        return reason


def _is_lower_layer(folder: Path) -> bool:
    """Return whether a folder of packages comes behind another one on the kernel's path, as a base environment behind a
    virtual one: in front of all, its torch would win."""
    layers = [each for each in sys.path if each.endswith("-packages")]
    return str(folder) in layers[1:]


def _alone(directory: Path) -> Path:
    """Return a folder that holds this package and nothing else, for an interpreter that has all other packages
    itself."""
    package = Path(__file__).parent.parent
    folder = paths.private(directory / f"source-{hashlib.sha256(str(package).encode()).hexdigest()[:8]}")
    with suppress(FileExistsError):
        (folder / package.name).symlink_to(package)
    return folder


def fingerprint(*more: object) -> str:
    """Return a hash of what an agent and its kernels must have in common."""
    parts = [
        PROTOCOL,
        *more,
        sys.executable,
        sys.prefix,
        sys.version,
        process_environment.version("torch"),
        process_environment.version("cloudpickle"),
        *_sources(),
        *sorted(_load_time_environment()),
        *(resource.getrlimit(getattr(resource, name)) for name in sorted(dir(resource)) if name.startswith("RLIMIT_")),
        os.getpriority(os.PRIO_PROCESS, 0),
        sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else "",
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def load_time_changes(env: dict[str, str]) -> dict[str, str]:
    """Return the variables that a forked rank would read too late."""
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


def _try(path: Path) -> socket.socket | None:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(str(path))
    except OSError:
        sock.close()
        return None
    return sock
