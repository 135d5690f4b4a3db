"""One node's side of a worker group that spans nodes: starts an agent on the node, and passes frames between it and the
coordinator. Runs in a process of the engine on that node; knows no engine.

    coordinator ==engine's own calls==> Relay --link--> agent --> ranks

`send` and `receive` block and are called in one thread each; messages about a cell are returned by either.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import pickle
import platform
import shutil
import signal
import socket
import stat
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from jupyter_distrib.coordinator.file_sync import COUNT_LIMIT, CopiedFile, Stamp, file_stamp, own_files
from jupyter_distrib.coordinator.node_agent import IDLE_S, KEPT_S, SHARED, SOCKET, NodeAgent, running_agent
from jupyter_distrib.coordinator.node_segments import StoredSegments
from jupyter_distrib.coordinator.relay_inbox import Answer, RelayInbox
from jupyter_distrib.errors import PayloadError, PoolError
from jupyter_distrib.serialization import shared_memory, value_cache
from jupyter_distrib.system import confinement, network_interfaces, process, process_environment, record_file
from jupyter_distrib.system.control_groups import free_memory_bytes
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.descriptors import Descriptors
from jupyter_distrib.wire.link import Link, decode_frame, encode, kind_of, peer_pid

WELCOME_S = 5.0
"""Seconds to wait for an existing agent to answer before another one is started."""
_NEW: Stamp = (-1, -1, False)
"""The stamp of a file that was not sent to this node."""
_PRIVATE = stat.S_IRUSR | stat.S_IWUSR


class Relay:
    """The link between one worker group and its agent on this node.

    Args:
        folder: Private to it; removed in the end.
        label: The label of the notebook.
        address: The address by which the engine knows this node.
        python: The interpreter of the agent and its ranks; empty: this process's own.
        env: Variables of the agent and its ranks; `${NAME}` is the node's own.
        plain: Whether the engine pickles large contents again in transit, so that they must be plain bytes.
        left_out: Prefixes of variables that the engine has set for its own process.
        gpus: The GPUs of this node that the engine has assigned to it, as CUDA_VISIBLE_DEVICES names them; None if
            the engine has left that to the variable.
        inbox: Takes messages from the agent; by default, an inbox that the engine polls.
        running: The folders of agents that earlier worker groups of the notebook have, by the address of their node.
            The agent of this node is used again: its forkserver has imported torch. None if the engine ends agents with
            their worker groups.
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
        gpus: Sequence[str] | None = None,
        inbox: RelayInbox | None = None,
        running: Mapping[str, str] | None = None,
    ) -> None:
        self._gpus = gpus
        self.address = address
        self._own_folder, self._plain = Path(folder), plain
        self._inbox = inbox or RelayInbox()
        self._project = ProjectCopy(self._own_folder / "project")
        self._content = IncomingContent()
        self._segments = StoredSegments()
        hello = m.Hello(
            protocol=m.PROTOCOL,
            session=session,
            pid=os.getpid(),
            label=label,
            python=platform.python_version(),
            torch=process_environment.version("torch"),
            cloudpickle=process_environment.version("cloudpickle"),
        )
        if not self._use((running or {}).get(address, ""), hello):
            idle_s = IDLE_S if running is None else KEPT_S
            agent = NodeAgent(self._own_folder, address, python, env or {}, left_out, idle_s=idle_s)
            if not self._connect(self._own_folder, agent.start(), hello):
                raise agent.error()
        threading.Thread(target=self._read, name="jupyter_distrib-read", daemon=True).start()

    def _use(self, folder: str, hello: m.Hello) -> bool:
        """Use the agent that has this folder. Return False if it has ended, or is about to, or is in another container,
        job or control group than this process, or if none is given."""
        sock = running_agent(folder) if folder else None
        if sock is not None and not confinement.is_here(peer_pid(sock)):
            sock.close()
            return False
        if sock is None or not self._connect(Path(folder), sock, hello, WELCOME_S):
            return False
        # Shows whether our folder is deserted, see `sweep`.
        (self._own_folder / SOCKET).symlink_to(Path(folder) / SOCKET)
        return True

    def _connect(self, folder: Path, sock: socket.socket, hello: m.Hello, limit_s: float | None = None) -> bool:
        """Greet an agent. Return False if it ends meanwhile, or is silent."""
        self._folder, self._link = folder, Link(sock)
        try:
            sock.settimeout(limit_s)
            self._link.send(hello)
            welcomed, _ = self._link.receive()
            sock.settimeout(None)
        except (EOFError, OSError):
            self._link.close()
            return False
        if not isinstance(welcomed, m.Welcomed):
            raise RuntimeError(f"the agent answered {type(welcomed).__name__}")
        self._welcomed = welcomed
        return True

    def describe(self, others: Sequence[str], directory: str) -> str:
        """Return the facts about this node that its placement needs, as JSON.

        Args:
            others: Addresses of the worker group's other nodes.
            directory: The notebook's folder.
        """
        about = {
            "pid": os.getpid(),
            "agent": self._welcomed.pid,
            "agent_folder": str(self._folder),
            "python": self._welcomed.python,
            "torch": self._welcomed.torch,
            "cloudpickle": self._welcomed.cloudpickle,
            "host": self.address,
            "interface": network_interfaces.towards(others, self.address),
            "machine": machine(),
            "folder": stamp(directory),
            "user": os.getuid(),
            "cache_bytes": value_cache.own_limit_bytes(),
        }
        return json.dumps(about)

    # ------------------------------------------------------------------------------------------------ to the agent

    def bring(self, files: Sequence[CopiedFile], gone: Sequence[str]) -> list[tuple[str, str]]:
        """Bring the notebook's files to this node; see `ProjectCopy.update`."""
        return self._project.update(files, gone)

    def add_part(self, part: Any, start: int, size_bytes: int) -> None:
        """Receive a part of the next cell's shared memory; the last part comes with the cell, see
        `IncomingContent.add`."""
        self._receive(part, start, size_bytes)

    def _receive(self, part: Any, start: int, size_bytes: int) -> None:
        if start == 0 and size_bytes >= free_memory_bytes():
            self._segments.drop_all()  # a cell that needs one of them fails, and the next gets them again
        self._content.add(part, start, size_bytes)

    def discard(self) -> None:
        """Discard the received content, because its cell will not come. Segments stay."""
        self._content.discard()

    def store(self, segment: str, part: Any, start: int, size_bytes: int) -> None:
        """Receive the last part of a content, and store it as a segment for the next cell and later ones."""
        self._receive(part, start, size_bytes)
        self._segments.add(segment, self._content.finish())

    def execute(self, frame: bytes, segments: Sequence[str], dropped: Sequence[str]) -> Answer | None:
        """Send a cell to the agent, with stored segments as its shared memory, as `send` does; then drop some.

        Raises:
            PayloadError: A segment did not arrive; the error says why.
        """
        if self._project.used:
            frame = self._localized(frame)
        with self._inbox.call_first():
            fds = self._segments.of(segments)
            if fds is None:
                raise self._content.refusal
            self._link.pass_on(frame, fds)
            self._segments.drop(dropped)
            return self._inbox.wait_for_end()

    def send(self, frame: bytes, *part: Any) -> Answer | None:
        """Send a command to the agent, with the last part of the content of its shared memory, see `add_part`. Returns
        the entries of a cell that came at once, if any."""
        kind = kind_of(frame)
        if kind == "OpenWorkerGroup" or (kind == "Execute" and self._project.used):
            frame = self._localized(frame)
        if kind != "Execute":
            self._link.pass_on(frame)
            return None
        with self._inbox.call_first():
            self._execute(frame, *part)
            return self._inbox.wait_for_end()

    def _localized(self, frame: bytes) -> bytes:
        """Return the command with the values that only this node knows."""
        command, fd_count = decode_frame(frame)
        if isinstance(command, m.Execute):
            return encode(self._project.locate(command), fd_count)
        assert isinstance(command, m.OpenWorkerGroup)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        words = None if visible is None else tuple(filter(None, visible.split(",")))
        return encode(replace(command, visible=words if self._gpus is None else tuple(self._gpus)), fd_count)

    def _execute(self, frame: bytes, *part: Any) -> None:
        if not part:
            return self._link.pass_on(frame)
        self._receive(*part)
        fd = self._content.finish()
        try:
            self._link.pass_on(frame, [fd])
        finally:
            os.close(fd)

    # ------------------------------------------------------------------------------------------------ from the agent

    def receive(self) -> Answer:
        """Wait for entries, and return all that have come since the last answer. Empty: the agent has ended."""
        return self._inbox.wait_for_entries()

    def _read(self) -> None:
        while True:
            try:
                frame, fds = self._link.receive_frame()
            except (EOFError, OSError):
                return self._inbox.end()
            with Descriptors(fds):
                content = self._content_of(fds[0]) if fds else None
            if self._project.used and kind_of(frame) == "Ended":
                with suppress(Exception):  # a note must not keep the end of a run from being passed on
                    self._note_written_files(frame)
            self._inbox.put(frame, content, more=self._link.has_frame)

    def _note_written_files(self, frame: bytes) -> None:
        """Put a note on the files that the run which ends here has written into the copy, where they are soon lost."""
        ended, _ = decode_frame(frame)
        assert isinstance(ended, m.Ended)
        if names := self._project.written():
            note = m.Noted(run=ended.run, rank=None, text=_lost(names, platform.node() or self.address))
            self._inbox.put(encode(note), None, more=True)

    def _content_of(self, fd: int) -> Any:
        """Return the content behind a descriptor, in a form that is pickled without a copy if possible."""
        size = os.fstat(fd).st_size
        if not size:
            return b""
        content = mmap.mmap(fd, size, access=mmap.ACCESS_READ)
        if not self._plain:
            return pickle.PickleBuffer(content)
        with content:
            return content[:]

    def logs(self, run: str) -> list[tuple[str, Any]]:
        """Return the name and content of each rank's log."""
        contents = []
        for path in sorted((self._folder / "logs" / run).glob("rank*.log")):
            with suppress(OSError), record_file.opened(path) as file:
                if os.fstat(file.fileno()).st_size:
                    contents.append((path.name, self._content_of(file.fileno())))
                path.unlink()
        return contents

    def end(self, *, keep_agent: bool = False) -> None:
        """End the agent and its ranks, which removes the folder; remove it here if the agent was killed. An agent that
        is kept or was used by several worker groups ends by itself when the last of them has gone."""
        with suppress(OSError):
            if keep_agent:
                (self._folder / SHARED).touch()
            self._link.sock.shutdown(socket.SHUT_RDWR)
        with suppress(ProcessLookupError):
            if not (self._folder / SHARED).exists():
                os.kill(self._welcomed.pid, signal.SIGTERM)
            os.kill(self._welcomed.pid, signal.SIGCONT)  # a suspended agent would keep its ranks and their GPUs
        if not process.is_alive(self._welcomed.pid):
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._own_folder != self._folder:
            shutil.rmtree(self._own_folder, ignore_errors=True)


def stamp(directory: str) -> tuple[int, int, int, bool] | None:
    """Return the properties that distinguish a shared folder from another folder of the same name: inode,
    modification time, owner, and whether the owner is this user; None if the folder does not exist."""
    try:
        info = os.stat(directory)
    except OSError:
        return None
    return info.st_ino, info.st_mtime_ns, info.st_uid, info.st_uid == os.geteuid()


def reason(error: OSError) -> str:
    """Return why a file could not be written and, if there is no room, what to look at."""
    advice = ", of bytes or of inodes: see `df -h` and `df -i`" if error.errno == errno.ENOSPC else ""
    return f"{error.strerror or error}{advice}"


def machine() -> str:
    """Return an identifier that is equal for all processes sharing one loopback interface."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip() + os.readlink("/proc/self/ns/net")
    except OSError:
        return socket.gethostname()


class IncomingContent:
    """The content of one cell at a time, as received so far."""

    def __init__(self) -> None:
        self._unfinished: shared_memory.Unfinished | None = None
        self.refusal: Exception = PayloadError("an earlier part of this content has not arrived.")
        """Reason why the content is missing."""

    def add(self, part: Any, start: int, size_bytes: int) -> None:
        """Add a part of a content of this size, in order from its beginning: bytes, or the path of their file.

        Raises:
            PayloadError: There is no room for it, or no such file here.
        """
        try:
            if start == 0:
                self.discard()
                self._unfinished = shared_memory.Unfinished(size_bytes)
            if self._unfinished is None:
                raise self.refusal
            self._unfinished.add(memoryview(_read(part) if isinstance(part, str) else part).cast("B"), start)
        except Exception as error:
            self.discard()
            self.refusal = error
            raise

    def finish(self) -> int:
        """Return the descriptor of the whole content, which the caller then owns."""
        assert self._unfinished is not None
        fd, self._unfinished = self._unfinished.finish(), None
        return fd

    def discard(self) -> None:
        """Discard a content that is not complete."""
        if self._unfinished is not None:
            self._unfinished.close()
            self._unfinished = None


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise PayloadError(
            f"{path}, in a folder that this node shares with the notebook, cannot be read here ({error.strerror}): set "
            "copy_files = true, so that values go through the connection."
        ) from None


def _lost(names: Sequence[str], node: str) -> str:
    """Return a sentence on files that were written into the copy of the notebook's folder."""
    others = len(names) - 1
    more = f" and {others} other file{'s' * (others > 1)}" if others else ""
    first = "".join(each if each.isprintable() else "?" for each in names[0])
    were, it = ("were", "them") if others else ("was", "it")
    return (
        f"{first}{more} {were} written on {node}, into a copy of the notebook's folder that is removed with the ranks: "
        f"write {it} to a path that the notebook's machine shares, or return {it} as the cell's value."
    )


class ProjectCopy:
    """The copy, in its own folder: each folder of the kernel's machine is a numbered folder in it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._known: dict[str, Stamp | None] = {}
        """The stamps of files as they were brought; None once `written` has returned the file."""
        self.used = False
        """Whether cells run in this copy, rather than in the notebook's folder."""

    def update(self, files: Sequence[CopiedFile], gone: Sequence[str]) -> list[tuple[str, str]]:
        """Write files that have changed, and make empty folders; remove what is gone. Returns the files that could
        not be written, with the reasons. From now on cells run in this copy."""
        self.used = True
        failed = []
        with self._lock:
            for name in gone:
                self._remove(self._folder / name)
                self._known.pop(name, None)
            for name, mtime_ns, is_executable, content in files:
                path = self._folder / name
                try:
                    if name.endswith("/"):
                        path.mkdir(parents=True, exist_ok=True)
                        continue
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(content)
                    path.chmod(_PRIVATE | (stat.S_IXUSR if is_executable else 0))
                    os.utime(path, ns=(mtime_ns, mtime_ns))  # a changed module is imported again
                except OSError as error:
                    failed.append((name, reason(error)))
                self._known[name] = file_stamp(str(path))
        return failed

    def written(self) -> list[str]:
        """Return the files in the copy of the notebook's own folder that are new or changed, each only once. Hidden
        files and compiled modules do not count, nor do those beyond as many as may be copied."""
        with self._lock:
            found = []
            for name in islice(own_files(f"{self._folder}/0"), 2 * COUNT_LIMIT):
                known = self._known.get(f"0/{name}", _NEW)
                if known is not None and file_stamp(f"{self._folder}/0/{name}") not in (known, None):
                    found.append(name)
                    self._known[f"0/{name}"] = None
            return sorted(found)

    def _remove(self, path: Path) -> None:
        """Remove a file, and its folders as far as they are empty then: a file may be where a folder was."""
        with suppress(OSError):
            if path.is_dir() and not path.is_symlink():
                return path.rmdir()
            path.unlink(missing_ok=True)
            while (path := path.parent).parent != self._folder:
                path.rmdir()

    def locate(self, command: m.Execute) -> m.Execute:
        """Return the command with the folders of this copy in place of the kernel's. Raises `PoolError`."""
        setting = command.setting
        folders = dict.fromkeys((setting.directory, *setting.path))
        copies = {folder: str(self._folder / str(number)) for number, folder in enumerate(folders)}
        for copy in copies.values():
            try:
                os.makedirs(copy, exist_ok=True)
            except OSError as error:
                raise PoolError(f"the folder {copy} cannot be made ({reason(error)}).") from None
        path = tuple(copies[folder] for folder in setting.path)
        return replace(command, setting=replace(setting, path=path, directory=copies[setting.directory]))
