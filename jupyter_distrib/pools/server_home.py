"""The place of an agent or coordinator on this machine: the socket by which it is reached, and the way to start it.

The kernel binds the socket and hands it over, so that it can connect at once and nobody waits for a port or a file to
appear. Agents are found by a fingerprint of what they and their kernels must have in common.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import os
import resource
import socket
import stat
import sys
import threading
from contextlib import suppress
from dataclasses import field, replace
from pathlib import Path

from jupyter_distrib.errors import PoolError
from jupyter_distrib.system import (
    confinement,
    import_path,
    open_files,
    package_folders,
    paths,
    process_environment,
    record_file,
)
from jupyter_distrib.system.data_class import data_class
from jupyter_distrib.system.launch import exec_agent
from jupyter_distrib.system.process import TOO_MANY_PROCESSES
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.link import peer_pid

LARGEST_LOG_BYTES = 1 << 20
AGENT_NAME = "agent"
"""The beginning of the names of local agents' sockets; other kinds of pools use their own."""


@data_class
class Home:
    """The location of an agent, and the way to start it."""

    name: str
    python: str = ""
    """Interpreter of the agent; empty: the kernel's own."""
    module: str = "jupyter_distrib.agent"
    stdin_text: str = field(default="", repr=False)
    """Text for its standard input; it may contain keys."""

    @classmethod
    def of(cls, python: str) -> Home:
        """Return the home of the agent for an interpreter. Raises `PoolError` if the interpreter does not exist."""
        if not python:
            return cls(name=f"{AGENT_NAME}-{fingerprint()}")
        path = os.path.abspath(os.path.expanduser(python))
        if not os.access(path, os.X_OK) or os.path.isdir(path):
            raise PoolError(
                f"there is no interpreter at {path}: give --python the interpreter of an environment with torch."
            )
        info = os.stat(path)
        return cls(python=path, name=f"{AGENT_NAME}-{fingerprint(path, info.st_mtime_ns, info.st_size)}")

    @property
    def log(self) -> Path:
        return paths.runtime_directory() / f"{self.name}.log"

    def reach(self) -> socket.socket:
        """Return a connection to the agent, and start it if need be. Raises `PoolError`.

        An agent that was moved out of the kernel's control groups keeps its name, and a new one here gets another name.
        """
        directory = paths.runtime_directory()
        for number in itertools.count(1):
            home = self if number == 1 else replace(self, name=f"{self.name}-{number}")
            sock, started = home._reach_or_start(directory)  # noqa: SLF001 - of the same class
            if started or confinement.is_here(peer_pid(sock)):
                return sock
            sock.close()
        raise AssertionError

    def _reach_or_start(self, directory: Path) -> tuple[socket.socket, bool]:
        """Return a connection to the agent of this name, and whether it was started by this call."""
        path = directory / f"{self.name}.sock"
        if len(os.fsencode(path)) > paths.SOCKET_PATH_LIMIT:
            raise PoolError(
                f"{path} is too long for a socket; set JUPYTER_DISTRIB_RUNTIME_DIR to a folder with a shorter path."
            )
        try:
            if (sock := connected(path)) is not None:
                return sock, False
            with paths.opened(directory / f"{self.name}.lock") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if (sock := connected(path)) is not None:
                    return sock, False
                self._start(path, directory)
                if (sock := connected(path)) is not None:
                    return sock, True
        except OSError as error:
            raise PoolError(self._not_started(error)) from error
        raise PoolError(f"the agent could not be started; see {self.log}.")

    def _not_started(self, error: OSError) -> str:
        if not os.access(python := self.python or sys.executable, os.X_OK):
            return f"there is no interpreter at {python} any more: recreate its environment, or restart the kernel."
        if limit := open_files.advice_on(error):
            return f"the agent could not be started: {limit}"
        if error.errno == errno.EAGAIN:
            return f"the agent could not be started: {TOO_MANY_PROCESSES}."
        place = f"{error.filename} is in the way ({error.strerror}): remove it" if error.filename else str(error)
        return f"the agent could not be started: {place}."

    def _start(self, path: Path, directory: Path) -> None:
        paths.clear(path, stat.S_IFSOCK)
        path.unlink(missing_ok=True)
        arguments = (self.module, str(directory), self.name)
        env, python = self._environment(directory), self.python or sys.executable
        with paths.opened(self.log) as log:
            process = exec_agent(str(path), log, arguments, env, python, stdin_text=self.stdin_text)
        # It usually outlives this kernel; if not, it must not stay a zombie.
        threading.Thread(target=process.wait, name="jupyter_distrib-agent", daemon=True).start()

    def _environment(self, directory: Path) -> dict[str, str]:
        """Return the kernel's environment, extended so that this package can be imported from anywhere, even from a
        source folder."""
        root = Path(__file__).parent.parent.parent
        added = () if self.python else package_folders.added_first()
        if self.python or added or _is_lower_layer(root):
            root = _alone(directory)
        inherited = process_environment.for_interpreter()
        folders = {name: paths.absolute(inherited[name]) for name in paths.VARIABLES if inherited.get(name)}
        return {
            **inherited,
            **folders,
            **confinement.job_variables(),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(root), *added, inherited.get("PYTHONPATH")))),
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        }

    def explained(self, reason: str) -> str:
        """Return the reason why the agent has ended, with the last output of an agent under another interpreter."""
        if not self.python:
            return reason
        with suppress(OSError):
            with record_file.opened(self.log) as file:
                text = file.read(LARGEST_LOG_BYTES).decode("utf-8", "replace")
            if lines := text.split("\n")[-8:]:
                last = " ".join(filter(None, map(str.strip, lines[-2:])))
                return f"{reason}; its last output under {self.python} was: {last}" if last else reason
        return reason


def _is_lower_layer(folder: Path) -> bool:
    """Return whether a folder of packages comes after another one on the kernel's path, as a base environment after a
    virtual one: put first, its torch would take precedence."""
    layers = [each for each in import_path.folders() if each.endswith("-packages")]
    return str(folder) in layers[1:]


def _alone(directory: Path) -> Path:
    """Return a folder with this package only, for an interpreter that has all other packages itself."""
    package = Path(__file__).parent.parent
    folder = directory / f"source-{hashlib.sha256(str(package).encode()).hexdigest()[:8]}"
    paths.clear(folder, stat.S_IFDIR)
    link = paths.private(folder) / package.name
    paths.clear(link, stat.S_IFLNK)
    if link.is_symlink() and os.readlink(link) != str(package):
        link.unlink(missing_ok=True)
    with suppress(FileExistsError):
        link.symlink_to(package)
    return folder


def fingerprint(*more: object) -> str:
    """Return a hash of everything that an agent and its kernels must have in common."""
    parts = [
        m.PROTOCOL,
        *more,
        sys.executable,
        sys.prefix,
        sys.version,
        process_environment.version("torch"),
        process_environment.version("cloudpickle"),
        package_folders.added_first(),
        *_sources(),
        *sorted(process_environment.load_time_variables()),
        *(resource.getrlimit(getattr(resource, name)) for name in sorted(dir(resource)) if name.startswith("RLIMIT_")),
        os.getpriority(os.PRIO_PROCESS, 0),
        sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else "",
        *confinement.identity(),
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _sources() -> list[str]:
    """Return each source file of this package with its time and size; `%load_ext` waits for it."""
    found, folders = [], [str(Path(__file__).parent.parent)]
    for folder in folders:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir():
                    if entry.name != "__pycache__":  # another user's, who has a private umask, cannot be read
                        folders.append(entry.path)
                elif entry.name.endswith(".py"):
                    info = entry.stat()
                    found.append(f"{entry.path}:{info.st_mtime_ns}:{info.st_size}")
    return sorted(found)


def connected(path: Path) -> socket.socket | None:
    """Return a connection to this user's server at this path; None if there is none."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        info = path.lstat()
        if not stat.S_ISSOCK(info.st_mode) or info.st_uid != os.getuid():
            raise OSError("it is a link, or another user's")
        sock.connect(str(path))
    except OSError:
        sock.close()
        return None
    return sock
