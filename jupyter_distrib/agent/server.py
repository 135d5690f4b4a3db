"""The agent: kernels connect, it keeps their crews, and it outlives them.

    kernel A --link--\\                    /-- crew of A: ranks 0, 1
                      agent -- template --+
    kernel B --link--/                    \\-- crew of B: ranks 0..7

A kernel that goes away, by the end of its link or of its process, takes its crews with it, except one that executes a
detached run. Single-threaded, in one `Loop`.
"""

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
from jupyter_distrib.agent.admission import WaitingCrews
from jupyter_distrib.agent.forkservers import Templates
from jupyter_distrib.agent.output import prune
from jupyter_distrib.agent.run import NodeRun
from jupyter_distrib.agent.worker_group import Crew
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
    CloseCrew,
    CrewClosed,
    CrewRefused,
    Ended,
    Event,
    Execute,
    Exited,
    Forget,
    Hello,
    Meet,
    Message,
    OpenCrew,
    Part,
    Probe,
    Renew,
    Stop,
    Welcomed,
)

IDLE_S = float(os.environ.get("JUPYTER_DISTRIB_IDLE_S", "600"))
"""How long an agent without kernels and runs stays, so that the next kernel starts at once."""
AGAIN_S = 0.05
DEFAULT_CPU_RANKS = 2
LEAVING_S = 5.0
"""Ranks that have been told to leave are gone within this, or never."""
EARLY_RAN_S = 2.0
"""Ranks of the early template that have run no longer than this are exchanged for better ones when idle."""


class Agent:
    """Everything that lives on this node on behalf of the user's kernels with one environment."""

    def __init__(self, listener: socket.socket, directory: Path, name: str, launched: Launched | None = None) -> None:
        self._listener, self._directory, self._name = listener, directory, name
        self._loop = Loop()
        self._templates = Templates(self._loop, self._exchange_early, launched)
        self._clients: list[Client] = []
        self._crews: list[Crew] = []
        self._allotment = gpu_allocation.Allotment(directory, self._crews, lambda crew: self._close(crew, force=True))
        self._closing: list[Crew] = []
        self._waiting = WaitingCrews(self._loop, self._open, self._tell)
        self._detached = DetachedRuns(self._tell)
        self._idle_timer: Timer | None = None
        self._named = True
        self._started_s = time.monotonic()
        self._loop.on_child_ended = self._reap

    def run(self) -> None:
        self._templates.start()
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
        for crew in self._crews:
            crew.close(force=True)
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
        for crew in list(client.crews.values()):
            if not crew.detached:
                self._close(crew, force=True)
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
            case OpenCrew():
                self._open(client, command)
            case Execute():
                self._execute(client, command, fds)
            case Stop():
                self._stop_run(command)
            case Forget():
                if (crew := client.crews.get(command.crew)) is not None:
                    crew.forget(command)
            case CloseCrew():
                self._waiting.over(command.crew)
                if (crew := client.crews.get(command.crew)) is not None:
                    self._close(crew, force=command.force, reason=command.reason)
                    self._tell(client, CrewClosed(crew=command.crew))
            case Renew():
                if (crew := client.crews.get(command.crew)) is not None:
                    crew.renew()
            case Meet():
                if (crew := client.crews.get(command.crew)) is not None:
                    crew.meet(command)
            case Part():
                for crew in client.crews.values():
                    if crew.is_for(command.run):
                        crew.part(command)
            case Probe():
                for crew in client.crews.values():
                    if crew.run is not None and crew.is_for(command.run):
                        crew.run.look_closer()
            case Ask():
                self._answer_to(client, command)
            case Attach():
                self._detached.attach(client, command)

    def _welcome(self, client: Client, hello: Hello) -> None:
        if hello.protocol != PROTOCOL:
            return self._gone(client)
        client.hello = hello
        self._templates.start()  # gone if this agent has rested
        if hasattr(os, "pidfd_open"):
            with suppress(OSError):
                client.pidfd = os.pidfd_open(hello.pid)
                self._loop.watch(client.pidfd, lambda: self._gone(client))
        versions = {name: process_environment.version(name) for name in ("torch", "cloudpickle")}
        self._tell(client, Welcomed(pid=os.getpid(), python=platform.python_version(), **versions))

    # ------------------------------------------------------------------------------------------------ crews

    def _open(self, client: Client, command: OpenCrew) -> None:
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
            gpus, reason, busy = self._allotment.take(command.size, fitting, client.hello.label)
            if busy and (leaving_s := self._leaving_s(fitting)) > wanted.wait_s:
                return self._waiting.add(client, replace(wanted, wait_s=leaving_s), "")
            if busy and wanted.wait_s:
                return self._waiting.add(client, wanted, reason)
        self._waiting.over(command.crew)
        if reason:
            return self._tell(client, CrewRefused(crew=command.crew, reason=reason))
        if command.world_size > command.size:  # such ranks are not exchanged, see `Crew.early`
            self._templates.growing = False
        crew = Crew(
            command,
            loop=self._loop,
            templates=self._templates,
            gpus=gpus,
            node_has_gpus=bool(visible),
            logs=paths.log_directory(),
            tell=lambda event, fds: self._tell(client, event, fds),
        )
        crew.on_ended = lambda run: self._run_ended(client, crew, run)
        crew.on_refused = lambda: self._close(crew, force=True)
        client.crews[command.crew] = crew
        self._crews.append(crew)
        crew.open()

    def _leaving_s(self, gpus: Sequence[devices.Gpu]) -> float:
        """How long to wait for ranks that are on some of these, and have been told to leave; 0 if there are none."""
        closed_s = [crew.closed_s for crew in self._closing if set(gpus) & set(crew.gpus)]
        return max([0.0, *(LEAVING_S - (time.monotonic() - each_s) for each_s in closed_s)])

    def _close(self, crew: Crew, *, force: bool, reason: str = "") -> None:
        if crew.closed:
            return
        crew.close(force=force, reason=reason)
        self._crews.remove(crew)
        self._closing.append(crew)
        for client in self._clients:
            client.crews.pop(crew.name, None)
        if force or not crew.living:
            self._give_back(crew)
        self._maybe_idle()

    def _give_back(self, crew: Crew) -> None:
        """Its GPUs are free for others: the ranks are gone, or have been killed this moment."""
        self._allotment.give_back(crew.gpus)
        crew.gpus = []
        self._waiting.some_are_free()

    def _exchange_early(self) -> None:
        """The fuller template is ready: give crews that nobody will miss the better ranks."""
        for crew in self._crews:
            if crew.early and crew.idle and not crew.kept and crew.ran_s < EARLY_RAN_S:
                crew.replace_all()

    # ------------------------------------------------------------------------------------------------ runs

    def _execute(self, client: Client, command: Execute, fds: list[int]) -> None:
        self._reap()  # a rank that died a moment ago is replaced before the cell, not lost in it
        crew = client.crews.get(command.crew)
        if crew is None:
            for fd in fds:
                os.close(fd)
            return self._tell_no_crew(client, command)
        if not command.detached:
            crew.execute(command, fds, lambda event, out: self._tell(client, event, out), client.link.frame)
            return
        tell = self._detached.begin(client, command, crew.command.world_size or crew.command.size, gpus=bool(crew.gpus))
        crew.execute(command, fds, tell)

    def _tell_no_crew(self, client: Client, command: Execute) -> None:
        """The crew went away while the cell was on its way."""
        now = time.monotonic()
        for rank in command.ranks:
            gone = Exited(run=command.run, rank=rank, pid=0, exit_code=None, asked=False, at_s=now)
            self._tell(client, gone)
        self._tell(client, Ended(run=command.run, at_s=now))

    def _stop_run(self, command: Stop) -> None:
        for crew in list(self._crews):
            if crew.is_for(command.run):
                crew.stop(force=command.force)
                self._close_if_left(crew)

    def _close_if_left(self, crew: Crew) -> None:
        """Its kernel has gone, and so is now the detached run for which it stayed."""
        if crew.idle and not any(crew in client.crews.values() for client in self._clients):
            self._close(crew, force=False)

    def _run_ended(self, client: Client, crew: Crew, run: NodeRun) -> None:
        if run.command.detached and client not in self._clients:
            self._loop.later(0, lambda: self._close_if_left(crew))
        elif crew.early:
            self._loop.later(0, self._exchange_if_fuller)

    def _exchange_if_fuller(self) -> None:
        if self._templates.fuller:
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
            "template": self._templates.state,
            "crews": tuple(crew for client in self._clients for crew in client.described()),
            "detached": self._detached.described(),
            "gpus": self._allotment.described(),
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
            self._templates.ended(pid)
            for crew in (*self._crews, *self._closing):
                if (rank := crew.find(pid)) is not None:
                    ended = True
                    crew.lost(rank, os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024)
        if ended:
            for crew in [crew for crew in self._closing if not crew.living]:
                self._closing.remove(crew)
                self._give_back(crew)
            self._kill_adopted()

    def _kill_adopted(self, seen: frozenset[int] = frozenset()) -> None:
        """Children that are neither ranks nor templates: daemons of a rank. Those of living ranks stay, and so does at
        the first look what does not show whose it is; `seen` are those of that look."""
        if self._templates.busy:
            self._loop.later(AGAIN_S, self._kill_adopted)
            return
        crews = (*self._crews, *self._closing)
        ranks = {pid for crew in crews for pid in crew.pids}
        sessions = ranks | {self._templates.session}
        marks = {mark for crew in crews for mark in crew.marks}

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
        busy = self._clients or self._crews or self._detached.going_on
        if busy and self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        elif not busy and self._idle_timer is None:
            self._idle_timer = self._loop.later(IDLE_S, self._rest if self._detached else self._retire)

    def _rest(self) -> None:
        """Nobody is here, but the records of detached runs are: stay for those, without the template's memory."""
        self._templates.stop()
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
