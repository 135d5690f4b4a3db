"""One node's side of a worker group that spans nodes: starts an agent on the node, and passes frames between it and the
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
import shutil
import signal
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from jupyter_distrib.coordinator.incoming_content import IncomingContent
from jupyter_distrib.coordinator.node_agent import IDLE_S, KEPT_S, SHARED, SOCKET, NodeAgent, running_agent
from jupyter_distrib.coordinator.project_copy import ProjectCopy
from jupyter_distrib.coordinator.relay_inbox import Answer, RelayInbox
from jupyter_distrib.system import confinement, network_interfaces, process, process_environment, record_file
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.descriptors import Descriptors
from jupyter_distrib.wire.link import Link, decode_frame, encode, kind_of, peer_pid

WELCOME_S = 5.0
"""Seconds for which an agent that is there may be silent before another one is started."""


class Relay:
    """A link of one worker group to its agent on this node.

    Args:
        folder: Private to it; removed in the end.
        label: The label of the notebook.
        address: The address by which the engine knows this node.
        python: The interpreter of the agent and its ranks; empty: this process's own.
        env: Variables of the agent and its ranks; `${NAME}` is the node's own.
        plain: The engine pickles large contents again on their way: they must be plain bytes.
        left_out: Prefixes of variables that the engine has set for its own process.
        gpus: The GPUs of this node that the engine has assigned to it, as CUDA_VISIBLE_DEVICES names them; None if
            the engine has left that to the variable.
        inbox: Takes what comes from the agent, instead of an inbox that the engine asks.
        running: The folders of agents that earlier worker groups of the notebook have, by the address of their node.
            That of this node is used again: its forkserver has imported torch. None if the engine ends agents with
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
        (self._own_folder / SOCKET).symlink_to(Path(folder) / SOCKET)  # shows when our folder is deserted, see `sweep`
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
        }
        return json.dumps(about)

    # ------------------------------------------------------------------------------------------------ to the agent

    def bring(self, files: Sequence[tuple[str, int, bytes]], gone: Sequence[str]) -> list[tuple[str, str]]:
        """Bring the notebook's files to this node; see `ProjectCopy.update`."""
        return self._project.update(files, gone)

    def take(self, part: Any, start: int, size_bytes: int) -> None:
        """Take a part of the content of the next cell's shared memory; its last part comes with the cell, see
        `IncomingContent.add`."""
        self._content.add(part, start, size_bytes)

    def discard(self) -> None:
        """Discard the content that has come, because its cell will not."""
        self._content.discard()

    def send(self, frame: bytes, *part: Any) -> Answer | None:
        """Send a command to the agent, with the last part of the content of its shared memory, see `take`. Returns the
        entries of a cell that came at once, if any."""
        kind = kind_of(frame)
        if kind == "OpenWorkerGroup" or (kind == "Execute" and self._project.used):
            frame = self._localized(frame)
        if kind != "Execute":
            self._link.pass_on(frame)
            return None
        with self._inbox.call_first():
            self._execute(frame, *part)
            return self._inbox.take_at_once()

    def _localized(self, frame: bytes) -> bytes:
        """Return the same command, with the values that only this node has."""
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
        self._content.add(*part)
        fd = self._content.finish()
        try:
            self._link.pass_on(frame, [fd])
        finally:
            os.close(fd)

    # ------------------------------------------------------------------------------------------------ from the agent

    def receive(self) -> Answer:
        """Wait for entries, and return all that have come since the last answer. Empty: the agent has ended."""
        return self._inbox.take()

    def _read(self) -> None:
        while True:
            try:
                frame, fds = self._link.receive_frame()
            except (EOFError, OSError):
                return self._inbox.end()
            with Descriptors(fds):
                content = self._content_of(fds[0]) if fds else None
            self._inbox.put(frame, content, more=self._link.has_frame)

    def _content_of(self, fd: int) -> Any:
        """Return the content behind a descriptor, for a pickle that avoids a copy if it can."""
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
        """End the agent and its ranks, which removes the folder; remove it here if the agent has been killed. An agent
        that is kept, or that several worker groups have had, ends by itself when the last of them has gone."""
        with suppress(OSError):
            if keep_agent:
                (self._folder / SHARED).touch()
            self._link.sock.shutdown(socket.SHUT_RDWR)
        with suppress(ProcessLookupError):
            if not (self._folder / SHARED).exists():
                os.kill(self._welcomed.pid, signal.SIGTERM)
            os.kill(self._welcomed.pid, signal.SIGCONT)  # one that was stopped would keep its ranks and their GPUs
        if not process.is_alive(self._welcomed.pid):
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._own_folder != self._folder:
            shutil.rmtree(self._own_folder, ignore_errors=True)


def stamp(directory: str) -> tuple[int, int, int, bool] | None:
    """Return what tells a shared folder from another of the same name: its number, its time, its owner and whether
    that is this user; None if the folder does not exist."""
    try:
        info = os.stat(directory)
    except OSError:
        return None
    return info.st_ino, info.st_mtime_ns, info.st_uid, info.st_uid == os.geteuid()


def machine() -> str:
    """Return a word that is equal for all processes that share one loopback interface."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip() + os.readlink("/proc/self/ns/net")
    except OSError:
        return socket.gethostname()
