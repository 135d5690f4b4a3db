"""The agent: kernels connect, it keeps their worker groups, and it outlives them.

    kernel A --link--\\                    /-- worker group of A: ranks 0, 1
                      agent -- forkserver --+
    kernel B --link--/                    \\-- worker group of B: ranks 0..7

A kernel that goes away, by the end of its link or of its process, takes its worker groups with it, except one that
executes a detached run. Single-threaded, in one `Loop`."""

from __future__ import annotations

import fcntl
import os
import platform
import socket
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from jupyter_distrib.agent import devices, gpu_allocation
from jupyter_distrib.agent.admission import WaitingGroups
from jupyter_distrib.agent.forkservers import Forkservers
from jupyter_distrib.agent.output import prune
from jupyter_distrib.agent.run import NodeRun
from jupyter_distrib.agent.worker_group import NodeWorkerGroup
from jupyter_distrib.server import detached_runs
from jupyter_distrib.server.client import Client
from jupyter_distrib.server.detached_runs import DetachedRuns
from jupyter_distrib.system import control_groups, paths, process_environment, reap
from jupyter_distrib.system.event_loop import Loop, Timer
from jupyter_distrib.system.launch import Launched
from jupyter_distrib.wire.link import Link, LinkError, encode, peer_uid
from jupyter_distrib.wire.messages import (
    PROTOCOL,
    Answered,
    Ask,
    Attach,
    CloseWorkerGroup,
    CutRemoteSockets,
    Ended,
    Event,
    Execute,
    Exited,
    Forget,
    Hello,
    MakeStore,
    Message,
    OpenWorkerGroup,
    Probe,
    Stop,
    UseStore,
    Welcomed,
    WorkerGroupClosed,
    WorkerGroupRefused,
)

IDLE_S = float(os.environ.get("JUPYTER_DISTRIB_IDLE_S", "600"))
"""How long an agent without kernels and runs stays, so that the next kernel starts at once."""
AGAIN_S = 0.05
DEFAULT_CPU_RANKS = 2
LEAVING_S = 5.0
"""Ranks that have been told to leave are gone within this, or never."""
EARLY_RAN_S = 2.0
"""Ranks of the base forkserver that have run no longer than this are exchanged for better ones when idle."""


class Agent:
    """Everything that lives on this node on behalf of the user's kernels with one environment."""

    def __init__(self, listener: socket.socket, directory: Path, name: str, launched: Launched | None = None) -> None:
        self._listener, self._directory, self._name = listener, directory, name
        self._loop = Loop()
        self._forkservers = Forkservers(self._loop, self._exchange_early, launched)
        self._clients: list[Client] = []
        self._groups: list[NodeWorkerGroup] = []
        self._gpu_allocation = gpu_allocation.GpuAllocation(
            directory, self._groups, lambda group: self._close(group, force=True)
        )
        self._closing: list[NodeWorkerGroup] = []
        self._waiting = WaitingGroups(self._loop, self._open, self._tell)
        self._detached = DetachedRuns(self._tell)
        self._idle_timer: Timer | None = None
        self._named = True
        self._started_s = time.monotonic()
        self._loop.on_child_ended = self._reap

    def run(self) -> None:
        self._forkservers.start()
        self.serve()

    def serve(self) -> None:
        """Take kernels in until nobody needs this process any more."""
        self._listener.setblocking(False)
        self._loop.watch(self._listener.fileno(), self._accept)
        self._prune()
        prune(paths.log_directory())
        self._maybe_idle()
        self._loop.run()

    def stop(self) -> None:
        for group in self._groups:
            group.close(force=True)
        self._unlink()
        self._loop.stop()

    # ------------------------------------------------------------------------------------------------ kernels

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # nobody there any more, or no descriptor left for anybody
            return
        if peer_uid(sock) not in (None, os.getuid()):
            sock.close()
            return
        sock.setblocking(False)
        client = Client(link=Link(sock))
        self._clients.append(client)
        self._watch(client)
        self._maybe_idle()

    def _watch(self, client: Client) -> None:
        self._loop.watch(
            client.link.fileno(),
            lambda: self._readable(client),
            (lambda: self._flush(client)) if client.link.unsent else None,
        )

    def _flush(self, client: Client) -> None:
        try:
            if client in self._clients:
                client.link.flush()
                self._watch(client)
        except OSError:
            self._gone(client)

    def _tell(self, client: Client | None, event: Event, fds: tuple[int, ...] = ()) -> None:
        if client is None or client not in self._clients:
            return
        if not client.link.unsent:
            self._loop.soon(lambda: self._flush(client))
        client.link.post(encode(event, len(fds)), fds)

    def _readable(self, client: Client) -> None:
        try:
            for message, fds in client.link.read():
                self._obey(client, message, fds)
        except (EOFError, OSError, LinkError):
            self._gone(client)
        except Exception:  # noqa: BLE001 - whatever one kernel sends, the ranks of the others live on
            traceback.print_exc()  # into the agent's log
            self._gone(client)

    def _gone(self, client: Client) -> None:
        """The kernel has left or died: its ranks end now, so that its GPU memory is free."""
        if client not in self._clients:
            return
        self._clients.remove(client)
        self._waiting.gone(client)
        self._loop.watch(client.link.fileno(), None)
        client.link.close()
        if client.pidfd >= 0:
            self._loop.watch(client.pidfd, None)
            os.close(client.pidfd)
        for group in list(client.groups.values()):
            if not group.detached:
                self._close(group, force=True)
        self._maybe_idle()

    def _obey(self, client: Client, command: Message, fds: list[int]) -> None:
        if not isinstance(command, Execute) or client.hello is None:
            for fd in fds:  # only a cell comes with any
                os.close(fd)
        if client.hello is None and not isinstance(command, Hello):
            return self._gone(client)
        match command:
            case Hello():
                self._welcome(client, command)
            case OpenWorkerGroup():
                self._open(client, command)
            case Execute():
                self._execute(client, command, fds)
            case Stop():
                self._stop_run(command)
            case Forget():
                if (group := client.groups.get(command.group)) is not None:
                    group.forget(command)
            case CloseWorkerGroup():
                self._waiting.over(command.group)
                if (group := client.groups.get(command.group)) is not None:
                    self._close(group, force=command.force, reason=command.reason)
                    self._tell(client, WorkerGroupClosed(group=command.group))
            case MakeStore():
                if (group := client.groups.get(command.group)) is not None:
                    group.make_store()
            case UseStore():
                if (group := client.groups.get(command.group)) is not None:
                    group.use_store(command)
            case CutRemoteSockets():
                for group in client.groups.values():
                    if group.is_for(command.run):
                        group.part(command)
            case Probe():
                for group in client.groups.values():
                    if group.run is not None and group.is_for(command.run):
                        group.run.look_closer()
            case Ask():
                self._answer_to(client, command)
            case Attach():
                self._detached.attach(client, command)

    def _welcome(self, client: Client, hello: Hello) -> None:
        if hello.protocol != PROTOCOL:
            return self._gone(client)
        client.hello = hello
        self._forkservers.start()  # gone if this agent has rested
        if hasattr(os, "pidfd_open"):
            with suppress(OSError):
                client.pidfd = os.pidfd_open(hello.pid)
                self._loop.watch(client.pidfd, lambda: self._gone(client))
        versions = {name: process_environment.version(name) for name in ("torch", "cloudpickle")}
        self._tell(client, Welcomed(pid=os.getpid(), python=platform.python_version(), **versions))

    # ------------------------------------------------------------------------------------------------ worker groups

    def _open(self, client: Client, command: OpenWorkerGroup) -> None:
        gpus: list[devices.Gpu] = []
        visible = devices.visible(devices.gpus(), command.visible)
        found = visible if command.gpus else []
        fitting = devices.of_type(found, command.gpu_type)
        wanted = command
        command = replace(command, gpus=bool(found), size=command.size or len(fitting) or DEFAULT_CPU_RANKS)
        if fitting or not command.gpu_type:
            reason = gpu_allocation.too_many(command.size)
        else:
            reason = gpu_allocation.no_such_type(command.gpu_type, found)
        if not reason and fitting:
            assert client.hello is not None
            gpus, reason, busy = self._gpu_allocation.take(command.size, fitting, client.hello.label)
            if busy and (leaving_s := self._leaving_s(fitting)) > wanted.wait_s:
                return self._waiting.add(client, replace(wanted, wait_s=leaving_s), "")
            if busy and wanted.wait_s:
                return self._waiting.add(client, wanted, reason)
        self._waiting.over(command.group)
        if reason:
            return self._tell(client, WorkerGroupRefused(group=command.group, reason=reason))
        if command.world_size > command.size:  # such ranks are not exchanged, see `WorkerGroup.early`
            self._forkservers.growing = False
        group = NodeWorkerGroup(
            command,
            loop=self._loop,
            forkservers=self._forkservers,
            gpus=gpus,
            node_has_gpus=bool(visible),
            logs=paths.log_directory(),
            tell=lambda event, fds: self._tell(client, event, fds),
        )
        group.on_ended = lambda run: self._run_ended(client, group, run)
        group.on_refused = lambda: self._close(group, force=True)
        client.groups[command.group] = group
        self._groups.append(group)
        group.open()

    def _leaving_s(self, gpus: Sequence[devices.Gpu]) -> float:
        """How long to wait for ranks that are on some of these, and have been told to leave; 0 if there are none."""
        closed_s = [group.closed_s for group in self._closing if set(gpus) & set(group.gpus)]
        return max([0.0, *(LEAVING_S - (time.monotonic() - each_s) for each_s in closed_s)])

    def _close(self, group: NodeWorkerGroup, *, force: bool, reason: str = "") -> None:
        if group.closed:
            return
        group.close(force=force, reason=reason)
        self._groups.remove(group)
        self._closing.append(group)
        for client in self._clients:
            client.groups.pop(group.name, None)
        if force or not group.living:
            self._give_back(group)
        self._maybe_idle()

    def _give_back(self, group: NodeWorkerGroup) -> None:
        """Its GPUs are free for others: the ranks are gone, or have been killed this moment."""
        self._gpu_allocation.give_back(group.gpus)
        group.gpus = []
        self._waiting.some_are_free()

    def _exchange_early(self) -> None:
        """The preloaded forkserver is ready: give worker groups that nobody will miss the better ranks."""
        for group in self._groups:
            if group.early and group.idle and not group.kept and group.ran_s < EARLY_RAN_S:
                group.replace_all()

    # ------------------------------------------------------------------------------------------------ runs

    def _execute(self, client: Client, command: Execute, fds: list[int]) -> None:
        self._reap()  # a rank that died a moment ago is replaced before the cell, not lost in it
        group = client.groups.get(command.group)
        if group is None:
            for fd in fds:
                os.close(fd)
            return self._tell_no_group(client, command)
        if not command.detached:
            group.execute(command, fds, lambda event, out: self._tell(client, event, out), client.link.frame)
            return
        tell = self._detached.begin(
            client, command, group.command.world_size or group.command.size, gpus=bool(group.gpus)
        )
        group.execute(command, fds, tell)

    def _tell_no_group(self, client: Client, command: Execute) -> None:
        """The worker group went away while the cell was on its way."""
        now = time.monotonic()
        for rank in command.ranks:
            gone = Exited(run=command.run, rank=rank, pid=0, exit_code=None, asked=False, at_s=now)
            self._tell(client, gone)
        self._tell(client, Ended(run=command.run, at_s=now))

    def _stop_run(self, command: Stop) -> None:
        for group in list(self._groups):
            if group.is_for(command.run):
                group.stop(force=command.force)
                self._close_if_left(group)

    def _close_if_left(self, group: NodeWorkerGroup) -> None:
        """Its kernel has gone, and so is now the detached run for which it stayed."""
        if group.idle and not any(group in client.groups.values() for client in self._clients):
            self._close(group, force=False)

    def _run_ended(self, client: Client, group: NodeWorkerGroup, run: NodeRun) -> None:
        if run.command.detached and client not in self._clients:
            self._loop.later(0, lambda: self._close_if_left(group))
        elif group.early:
            self._loop.later(0, self._exchange_if_preloaded)

    def _exchange_if_preloaded(self) -> None:
        if self._forkservers.preloaded:
            self._exchange_early()

    # ------------------------------------------------------------------------------------------------ housekeeping

    def _answer_to(self, client: Client, ask: Ask) -> None:
        self._tell(client, Answered(question=ask.question, answer=self._answer()))

    def _answer(self) -> dict[str, object]:
        return {
            "name": platform.node(),
            "cpus": control_groups.cores(),
            "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            "pid": os.getpid(),
            "up_s": time.monotonic() - self._started_s,
            "state": f"forkserver {self._forkservers.state}",
            "groups": tuple(group for client in self._clients for group in client.described()),
            "detached": self._detached.described(),
            "gpus": self._gpu_allocation.described(),
        }

    def _reap(self) -> None:
        """Take the exit status of every child that has ended, and clear away what ended ranks left."""
        ended = False
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            self._forkservers.ended(pid)
            for group in (*self._groups, *self._closing):
                if (rank := group.find(pid)) is not None:
                    ended = True
                    group.lost(rank, os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024)
        if ended:
            for group in [group for group in self._closing if not group.living]:
                self._closing.remove(group)
                self._give_back(group)
            self._kill_adopted()

    def _kill_adopted(self, seen: frozenset[int] = frozenset()) -> None:
        """Children that are neither ranks nor forkservers: daemons of a rank. Those of living ranks stay, and so does
        at the first look what does not show whose it is; `seen` are those of that look."""
        if self._forkservers.busy:
            self._loop.later(AGAIN_S, self._kill_adopted)
            return
        groups = (*self._groups, *self._closing)
        ranks = {pid for group in groups for pid in group.pids}
        sessions = ranks | {self._forkservers.session}
        marks = {mark for group in groups for mark in group.marks}

        bare: set[int] = set()

        def belongs_to_living(pid: int) -> bool:
            mark = reap.mark_of(pid, reap.WORKER)
            if mark is None and pid not in seen:
                bare.add(pid)
            return reap.session_of(pid) in sessions or mark in marks or pid in bare

        reap.kill_adopted(frozenset(ranks), belongs_to_living)
        if bare:
            self._loop.later(AGAIN_S, lambda: self._kill_adopted(frozenset(bare)))

    def _maybe_idle(self) -> None:
        """Start or stop counting the idle minutes."""
        busy = self._clients or self._groups or self._detached.going_on
        if busy and self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        elif not busy and self._idle_timer is None:
            self._idle_timer = self._loop.later(IDLE_S, self._rest if self._detached else self._retire)

    def _rest(self) -> None:
        """Nobody is here, but the records of detached runs are: stay for those, without the forkserver's memory."""
        self._forkservers.stop()
        self._idle_timer = self._loop.later(detached_runs.KEEP_S, self._retire)

    def _retire(self) -> None:
        """End, unless a kernel connects at this very moment.

        Kernels connect without the lock, so one may have come just before the name went: it is served to its end, while
        the next ones start an agent of their own.
        """
        self._idle_timer = None
        with (self._directory / f"{self._name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._accept()
            if not self._clients:
                self._unlink()
                self._accept()
            if not self._clients:
                self._loop.stop()

    def _unlink(self) -> None:
        """Give up the name. Once: afterwards it may be another agent's."""
        if self._named:
            self._named = False
            (self._directory / f"{self._name}.sock").unlink(missing_ok=True)

    def _prune(self) -> None:
        self._detached.prune()
        self._loop.later(detached_runs.KEEP_S / 24, self._prune)
