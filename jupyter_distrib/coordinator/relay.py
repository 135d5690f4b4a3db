"""One node's side of a worker group that spans nodes: starts an agent there, and passes frames between it and the
coordinator. Runs in a process of the engine on that node; knows no engine.

    coordinator ==engine's own calls==> Relay --link--> agent --> ranks

`send` and `receive` block and are called in one thread each; what comes of a cell is the answer to either.
"""

from __future__ import annotations

import json
import mmap
import os
import pickle
import platform
import re
import shutil
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from jupyter_distrib.errors import PayloadError, PoolError
from jupyter_distrib.serialization import shared_memory
from jupyter_distrib.system import network_interfaces, process_environment
from jupyter_distrib.system.launch import exec_agent
from jupyter_distrib.wire.link import Link, decode_frame, encode, kind_of, split
from jupyter_distrib.wire.messages import PROTOCOL, Execute, Hello, OpenWorkerGroup, Welcomed

SOCKET = "agent.sock"
STARTING_S = 60.0
IDLE_S = 3.0
"""The agent ends this long after its host has gone."""
AT_ONCE_S = 0.02
"""A cell that is over so soon is answered by the call that brought it."""
GATHER_S = 0.003
"""Behind the end of one rank, that of the others and of the run are close: they travel together."""
_NUMBER = struct.Struct("!Q")
Entry = tuple[bytes, Any]
"""A frame, with the content of its shared memory, or None."""
Answer = bytes | tuple[int, list[Entry]]
"""Entries in their order, and the number of this answer: the engine may tell of a later one first. Bytes, which engines
carry at less cost, if no entry has a content; see `opened`."""


class Relay:
    """An agent of this worker group's own, in a folder that goes with it.

    Args:
        folder: Private to it; removed in the end.
        label: Of the notebook.
        address: By which the engine knows this node.
        python: The interpreter of the agent and its ranks; empty: this process's own.
        env: Variables of the agent and its ranks; `${NAME}` is the node's own.
        plain: The engine pickles large contents again on their way: they must be plain bytes.
        left_out: Prefixes of variables that the engine has set for its own process.
    """

    def __init__(
        self,
        folder: str,
        label: str,
        session: str,
        *,
        address: str,
        python: str = "",
        plain: bool = False,
        env: Mapping[str, str] | None = None,
        left_out: Sequence[str] = (),
    ) -> None:
        self._folder, self._address, self._python = Path(folder), address, os.path.expanduser(python)
        self._env, self._left_out = _expanded(env or {}), tuple(left_out)
        sweep(self._folder)
        self._link = Link(self._start())
        self._lock = threading.Lock()
        self._news, self._at_once = threading.Condition(self._lock), threading.Condition(self._lock)
        """For `receive`, and for `send`."""
        self._inbox: list[Entry] = []
        self._last = ""
        """The class of what has come last."""
        self._answers = 0
        self._sending = False
        """What comes now is for `send` to answer."""
        self._over = False
        self._mapped = False
        """Folders of the notebook are copies here, see `bring`."""
        self._incoming: shared_memory.Unfinished | None = None
        """Content of the next cell, as far as it is here."""
        self._refusal: Exception = PayloadError("the parts before this one have not come.")
        """Why it is not."""
        self._plain = plain
        hello = Hello(
            protocol=PROTOCOL,
            session=session,
            pid=os.getpid(),
            label=label,
            python=platform.python_version(),
            torch=process_environment.version("torch"),
            cloudpickle=process_environment.version("cloudpickle"),
        )
        try:
            self._link.send(hello)
            welcomed, _ = self._link.receive()
        except (EOFError, OSError):
            raise self._not_started() from None
        if not isinstance(welcomed, Welcomed):
            raise RuntimeError(f"the agent answered {type(welcomed).__name__}")
        self._welcomed = welcomed
        threading.Thread(target=self._read, name="jupyter_distrib-read", daemon=True).start()

    def describe(self, others: Sequence[str], directory: str) -> str:
        """What whoever placed it must know, as JSON.

        Args:
            others: Addresses of the worker group's other nodes.
            directory: The notebook's folder.
        """
        about = {
            "pid": os.getpid(),
            "agent": self._welcomed.pid,
            "python": self._welcomed.python,
            "torch": self._welcomed.torch,
            "cloudpickle": self._welcomed.cloudpickle,
            "host": self._address,
            "interface": network_interfaces.towards(others, self._address),
            "machine": _machine(),
            "folder": stamp(directory),
            "gpus": _gpu_names(),
        }
        return json.dumps(about)

    def bring(self, files: Sequence[tuple[str, int, bytes]], gone: Sequence[str]) -> list[tuple[str, str]]:
        """The project's files that have changed, by path, time of change and content; and those that are gone. Returns
        those that could not be written, and why. From now on cells run in these copies."""
        self._mapped = True
        failed = []
        for name in gone:
            self._take_away(self._project / name)
        for name, mtime_ns, content in files:
            path = self._project / name
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
                os.utime(path, ns=(mtime_ns, mtime_ns))  # a changed module is imported again
            except OSError as error:
                failed.append((name, error.strerror or str(error)))
        return failed

    def _take_away(self, path: Path) -> None:
        """A file, and its folders as far as they are empty then: a file may be where a folder was."""
        with suppress(OSError):
            path.unlink(missing_ok=True)
            while (path := path.parent).parent != self._project:
                path.rmdir()

    def take(self, part: Any, start: int, size_bytes: int) -> None:
        """A part of the content of the next cell's shared memory, which has this size; from its begin to its end, the
        last one with the cell. Raises `PayloadError` if there is no room for it."""
        try:
            if start == 0:
                self.discard()
                self._incoming = shared_memory.Unfinished(size_bytes)
            if self._incoming is None:
                raise self._refusal
            self._incoming.add(memoryview(part).cast("B"), start)
        except Exception as error:
            self.discard()
            self._refusal = error
            raise

    def discard(self) -> None:
        """The cell for which parts have come will not."""
        if self._incoming is not None:
            self._incoming.close()
            self._incoming = None

    def send(self, frame: bytes, *part: Any) -> Answer | None:
        """A command for the agent, with the last part of the content of its shared memory, see `take`. Returns what has
        come of a cell at once."""
        kind = kind_of(frame)
        if kind == "OpenWorkerGroup" or (kind == "Execute" and self._mapped):
            frame = self._of_here(frame)
        if kind != "Execute":
            self._link.pass_on(frame)
            return None
        with self._lock:
            self._sending, self._last = True, ""
        try:
            self._execute(frame, *part)
            with self._lock:
                self._at_once.wait_for(lambda: self._over or self._last == "Ended", AT_ONCE_S)
                return self._taken()
        finally:
            with self._lock:
                self._sending = False
                self._news.notify()

    def _of_here(self, frame: bytes) -> bytes:
        """The same command, with what only this node knows."""
        command, fd_count = decode_frame(frame)
        if isinstance(command, Execute):
            return encode(self._in_project(command), fd_count)
        assert isinstance(command, OpenWorkerGroup)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        words = None if visible is None else tuple(filter(None, visible.split(",")))
        return encode(replace(command, visible=words), fd_count)

    def _execute(self, frame: bytes, *part: Any) -> None:
        if not part:
            return self._link.pass_on(frame)
        self.take(*part)
        assert self._incoming is not None
        fd, self._incoming = self._incoming.finish(), None
        try:
            self._link.pass_on(frame, [fd])
        finally:
            os.close(fd)

    def _in_project(self, command: Execute) -> Execute:
        """Folders of the kernel's machine are numbered copies here."""
        setting = command.setting
        there = dict.fromkeys((setting.directory, *setting.path))
        here = {folder: str(self._project / str(number)) for number, folder in enumerate(there)}
        for folder in here.values():
            os.makedirs(folder, exist_ok=True)
        path = tuple(here[folder] for folder in setting.path)
        return replace(command, setting=replace(setting, path=path, directory=here[setting.directory]))

    @property
    def _project(self) -> Path:
        return self._folder / "project"

    def receive(self) -> Answer:
        """All that has come since the last answer; waits for something. Empty: the agent has ended."""
        with self._lock:
            while True:
                self._news.wait_for(lambda: (self._inbox or self._over) and not self._sending)
                self._news.wait_for(lambda: self._over or self._sending or self._last != "Returned", GATHER_S)
                if (answer := self._taken()) is not None:
                    return answer

    def _taken(self) -> Answer | None:
        if not self._inbox and not self._over:
            return None
        number, entries = self._answers, self._inbox
        self._answers, self._inbox = self._answers + 1, []
        if any(content is not None for _, content in entries):
            return number, entries
        return _NUMBER.pack(number) + b"".join(frame for frame, _ in entries)

    def _read(self) -> None:
        while True:
            try:
                frame, fds = self._link.receive_frame()
            except (EOFError, OSError):
                with self._lock:
                    self._over = True
                    self._news.notify()
                    self._at_once.notify()
                return
            content = self._content(fds[0]) if fds else None
            kind = kind_of(frame)
            for fd in fds:
                os.close(fd)
            with self._lock:
                self._inbox.append((frame, content))
                self._last = kind
                if not self._sending:
                    self._news.notify()
                elif kind == "Ended":
                    self._at_once.notify()

    def _content(self, fd: int) -> Any:
        """What lies behind a descriptor, for a pickle that does not copy it if it can be helped."""
        size = os.fstat(fd).st_size
        if not size:
            return b""
        content = mmap.mmap(fd, size, access=mmap.ACCESS_READ)
        if not self._plain:
            return pickle.PickleBuffer(content)
        with content:
            return content[:]

    def logs(self, run: str) -> list[tuple[str, Any]]:
        """Name and content of each rank's log."""
        found = []
        for path in sorted((self._folder / "logs" / run).glob("rank*.log")):
            with path.open("rb") as file:
                if path.stat().st_size:
                    found.append((path.name, self._content(file.fileno())))
            path.unlink()
        return found

    def end(self) -> None:
        """Take the agent, its ranks and the folder away."""
        with suppress(OSError):
            self._link.sock.shutdown(socket.SHUT_RDWR)
        with suppress(ProcessLookupError):
            os.kill(self._welcomed.pid, signal.SIGTERM)

    def _start(self) -> socket.socket:
        """The agent leaves its parent, so that an engine which kills the children of its processes does not end it
        before it has ended its ranks; and it removes the folder when it goes."""
        python = self._python or sys.executable
        if not os.access(python, os.X_OK) or os.path.isdir(python):
            raise PoolError(
                f"there is no interpreter at {python} on node {self._address}: give --python that of an environment "
                "with torch that all nodes have."
            )
        path = str(self._folder / SOCKET)
        arguments = ("jupyter_distrib.agent", str(self._folder), "agent", "--alone")
        with (self._folder / "agent.log").open("wb") as log:
            try:
                parent = exec_agent(path, log, arguments, self._environment(), python)
            except OSError:  # of another machine, or no program at all
                raise self._not_started() from None
        sock = socket.socket(socket.AF_UNIX)
        if parent.wait() or sock.connect_ex(path):
            sock.close()
            raise self._not_started()
        return sock

    def _not_started(self) -> PoolError:
        said = (self._folder / "agent.log").read_text("utf-8", "replace").split("\n")
        last = next((f": {line.strip()}" for line in reversed(said) if line.strip()), "")
        python = self._python or sys.executable
        return PoolError(f"under {python} no agent can be started on node {self._address}{last}.")

    def _environment(self) -> dict[str, str]:
        """The node's own, without what the engine set for its own process."""
        source = str(Path(__file__).parent.parent.parent)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(self._left_out)}
        before = self._env.get("PYTHONPATH", os.environ.get("PYTHONPATH"))
        return {
            **kept,
            **self._env,
            "PYTHONPATH": source if not before else f"{source}{os.pathsep}{before}",
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "JUPYTER_DISTRIB_RUNTIME_DIR": str(self._folder),
            "JUPYTER_DISTRIB_LOG_DIR": str(self._folder / "logs"),
            "JUPYTER_DISTRIB_IDLE_S": str(IDLE_S),
        }


def opened(answer: Answer) -> tuple[int, list[Entry]]:
    """Number and entries of an answer."""
    if isinstance(answer, tuple):
        return answer
    (number,) = _NUMBER.unpack_from(answer)
    return number, [(frame, None) for frame in split(answer[_NUMBER.size :])]


def sweep(folder: Path) -> None:
    """Remove folders beside this one, of the same kind, whose agent was killed before it could."""
    kind = folder.name.rpartition("-")[0]
    for other in folder.parent.glob(f"{kind}-*"):
        if other != folder and _is_deserted(other / SOCKET):
            shutil.rmtree(other, ignore_errors=True)


def _is_deserted(path: Path) -> bool:
    """A socket is there, nobody listens at it, and it is not one that is just being made."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return time.time() - path.stat().st_mtime > STARTING_S
        except OSError:  # none yet, or somebody else's
            return False
    return False


def stamp(directory: str) -> tuple[int, int] | None:
    """Tells a folder that machines share from one of the same name; None if there is none here."""
    try:
        info = os.stat(directory)
    except OSError:
        return None
    return info.st_ino, info.st_mtime_ns


def _gpu_names() -> list[str]:
    from jupyter_distrib.agent import gpu_inventory

    return [gpu.name for gpu in gpu_inventory.read_now().gpus]


def _machine() -> str:
    """Equal for whoever shares one loopback interface."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip() + os.readlink("/proc/self/ns/net")
    except OSError:
        return socket.gethostname()


def _expanded(env: Mapping[str, str]) -> dict[str, str]:
    """Expand `${NAME}` in the values by this process's variables, one after another."""
    known = dict(os.environ)
    for name, value in env.items():
        known[name] = re.sub(r"\$\{(\w+)\}", lambda match: known.get(match[1], ""), value)
    return {name: known[name] for name in env}
