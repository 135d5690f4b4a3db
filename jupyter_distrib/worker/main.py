"""The rank: one command after another in the main thread, and a control thread that hears of a stop while the main
thread is busy.

    agent ==link==> control thread --inbox--> main thread: Execute, ResetGroups, Forget, Leave
                         |
                         +-- Cut: shut the sockets that a blocked collective waits on

The user's code runs in the main thread, where signals arrive. SIGINT raises `KeyboardInterrupt` only while a cell runs.
"""

from __future__ import annotations

import atexit
import gc
import os
import queue
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

from jupyter_distrib.errors import DistributedError, ValueLost
from jupyter_distrib.serialization import payload, tensors
from jupyter_distrib.system import crash_notes, library_imports, process
from jupyter_distrib.wire.link import Link
from jupyter_distrib.wire.messages import (
    CutSockets,
    Event,
    Execute,
    Forget,
    Leave,
    Message,
    Noted,
    Probe,
    Ready,
    ReplaceStreams,
    ResetGroups,
    Returned,
    RunEvent,
    Started,
    StreamsReplaced,
    WorkerOrder,
)
from jupyter_distrib.worker import (
    cell,
    displaying,
    framework,
    identity,
    local_modules,
    process_reset,
    rank_environment,
    reporting,
    threads,
)
from jupyter_distrib.worker import strategy as strategy_module
from jupyter_distrib.worker.failure import interrupt_in
from jupyter_distrib.worker.late_output import LateThreads
from jupyter_distrib.worker.outcome import outcome
from jupyter_distrib.worker.probe import Prober

ANNOUNCE_S = 0.02
CLEAN_AFTER_S = 0.02
"""Idle for this long, a rank collects garbage: not while the next cell may be on its way."""
FLUSH_EVERY_S = 0.1
"""Seconds after which unfinished lines of a running cell are seen."""
ASKED_GRACE_S = 2.0
"""A SIGINT may overtake the command that explains it by this much."""


def run_worker(
    order: WorkerOrder,
    link_fd: int,
    stdout_fd: int,
    stderr_fd: int,
    loading_fd: int,
    *,
    early: bool,
    gone: int | None = None,
) -> NoReturn:
    """Be this rank until told to leave. Called in a process just forked from the forkserver, or just exec'd.

    `gone`, if given, is a pipe that ends when the process that forked this one does, so that the agent adopts it.
    """
    os.setsid()
    process.take_streams(stdout_fd, stderr_fd)
    identity.take(order)
    os.environ |= {"CUDA_VISIBLE_DEVICES": order.visible_devices or "", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    worker = Worker(order, Link(socket.socket(fileno=link_fd)), loading_fd)
    signal.signal(signal.SIGINT, worker.on_interrupt)
    crash_notes.tell_place_on_signal(loading_fd)
    worker.settle()
    if gone is not None:
        os.read(gone, 1)
        os.close(gone)
    process.die_with_parent(order.agent_pid)
    worker.serve(early=early)


class Worker:
    """One rank's process."""

    def __init__(self, order: WorkerOrder, link: Link, loading_fd: int) -> None:
        self._loading = partial(crash_notes.note, loading_fd)
        self.order = order
        self.link = link
        self.inbox: queue.SimpleQueue[tuple[Message, list[int]] | None] = queue.SimpleQueue()
        self.modules = local_modules.of_forkserver or local_modules.LocalModules()
        self.late = LateThreads(order.rank, self._tell)
        self._littered = False
        self._in_cycles = False
        """Whether what the last cell left behind holds itself, and would be there beside all that the next one
        needs."""
        self._wanted: dict[str, str] = {}
        """The environment of a cell."""
        self._kept_by = ""
        """The last run that was to keep something."""
        self._wanted_for: object = None
        """Inputs of the cached environment."""
        self.running = ""
        """Id of the run whose cell is being executed."""
        self._left = ""
        """Id of the run before: who left it early may still be told to `CutSockets` its connections."""
        self.interruptible = False
        self._unheard = False
        """An interrupt came while a library was being imported, or something was being told; it is tried again."""
        self.asked = threading.Event()
        """Set by the control thread: the current run is being stopped."""
        self._telling = threading.RLock()
        self._in_send = False
        """Whether the thread that has `_telling` is inside a send."""
        self._meanwhile: list[Event] = []
        """Events that finalizers, which Python may call at any time, have reported in the midst of that."""
        self._sending = False
        """The main thread is at it."""
        self._unannounced: Started | None = None
        """A cell that ends within `ANNOUNCE_S` says that it started and that it returned in one go."""

    # ------------------------------------------------------------------------------------------------ main thread

    def serve(self, *, early: bool) -> NoReturn:
        threading.Thread(target=self._control, name="jupyter_distrib-control", daemon=True).start()
        self.link.send(Ready(rank=self.order.rank, pid=os.getpid(), early=early))
        while True:
            try:
                entry = self._next()
                if entry is None:
                    _leave()
                self._obey(*entry)
                del entry
                if self._in_cycles:
                    self._collect()
            except KeyboardInterrupt:  # it came a moment too late for the cell
                continue

    def _next(self) -> tuple[Message, list[int]] | None:
        if self._littered:
            try:
                return self.inbox.get(timeout=CLEAN_AFTER_S)
            except queue.Empty:
                self._collect()
        return self.inbox.get()

    def _collect(self) -> None:
        self._littered = self._in_cycles = False
        gc.collect()

    def settle(self) -> None:
        """Complete what a fork leaves to be done: threads, start method, and what the framework needs."""
        import multiprocessing

        assert framework.current is not None
        self.framework = framework.current
        threads.use(self.order.threads, {})
        if "fork" in multiprocessing.get_all_start_methods():
            multiprocessing.set_start_method("fork", force=True)
        self.handlers = process_reset.Handlers()
        displaying.install()
        self.framework.settle(self.order)
        self.group = self.framework.groups
        self.prober = Prober(self.order.rank, self.framework.sightings)

    def _obey(self, command: Message, fds: list[int]) -> None:
        match command:
            case Execute():
                self._execute(command, fds)
            case ResetGroups():
                self.group.reset(command.host, command.port, fds[0] if fds else -1)
            case ReplaceStreams():
                self._part(command.run)
            case Forget():
                for key in command.keys:
                    payload.kept_values.pop(key, None)
                if not any(key.startswith(f"{self._kept_by}/") for key in payload.kept_values):
                    sys.modules["__main__"] = cell.fresh_module()  # the one that is there has them as globals
                gc.collect()
            case Leave():
                _leave()

    def _execute(self, command: Execute, fds: list[int]) -> None:
        run, rank = command.run, self.order.rank
        pid, device = os.getpid(), self.order.device
        self._unannounced = Started(run=run, rank=rank, pid=pid, device=device, at_s=time.monotonic())
        module = cell.fresh_module()
        value, error = self._guarded(command, fds, module)
        if error is not None:
            local_modules.drop_orphans()
        event, out_fds = self._outcome(command, module.__dict__, value, error)
        del value, error
        self.late.end(run)
        process.flush_streams()
        if process.has_children():
            self._part(run)
        self.modules.remember()
        self.running, self._left = "", run
        self._tell(event, out_fds)
        for fd in out_fds:
            os.close(fd)
        self._clear(command, module.__dict__)

    def _part(self, run: str) -> None:
        """Open new streams, so that output of processes that go on after their cell is not seen under the next one."""
        ends = process.renew_streams()
        self._tell(StreamsReplaced(run=run), ends)
        for fd in ends:
            os.close(fd)

    def _guarded(self, command: Execute, fds: list[int], module: types.ModuleType) -> tuple[Any, BaseException | None]:
        """The cell's value, or what it raised. Nothing that user code raises gets past this."""
        strategy, ok = None, False
        try:
            try:
                self.interruptible = True
                if self.asked.is_set():
                    raise KeyboardInterrupt
                self._prepare(command, fds, module)
                strategy = identity.strategy = self._strategy(command.setting.strategy)
                strategy.begin(self._strategy_run(command, module.__dict__))
                self.prober.begin(command.run, command.cell.filename)  # the cell's own collectives count from here
                value = cell.execute(command.cell, module.__dict__, strategy.adapted)
                strategy.returning(value)
                ok = True
            finally:
                self.interruptible = False
                if strategy is not None:
                    strategy.end(ok=ok)
            return value, None
        except BaseException as error:  # noqa: BLE001 - foreign code, and SystemExit and KeyboardInterrupt with it
            self.interruptible = False
            return None, error
        finally:
            reporter, reporting.current = reporting.current, None
            if reporter is not None:
                reporter.close()
            displaying.close()

    def _outcome(
        self, command: Execute, namespace: dict[str, object], value: Any, error: BaseException | None
    ) -> tuple[RunEvent, list[int]]:
        """Return the event that reports the end. Pickling the value runs the user's code too, and may be stopped."""

        def told(value: Any, error: BaseException | None) -> tuple[RunEvent, list[int]]:
            rank, sequence = self.order.rank, self.group.sequence()
            return outcome(command, rank, namespace, value, error, stopped=self._was_stopped, sequence=sequence)

        try:
            try:
                self.interruptible = error is None
                return told(value, error)
            finally:
                self.interruptible = False
        except BaseException as broken:  # noqa: BLE001 - as in `_guarded`
            self.interruptible = False
            return told(None, broken)

    def _prepare(self, command: Execute, fds: list[int], module: types.ModuleType) -> None:
        run = command.run
        self.framework.prepare()
        self._take_surroundings(command)
        process_reset.forget_singletons()
        for path in self.modules.refresh():
            self._tell(Noted(run=run, rank=self.order.rank, text=f"{path} has changed and is imported again"))
        self.late.begin()
        sys.modules["__main__"] = module
        namespace = module.__dict__
        namespace |= rank_environment.provided(namespace)
        data, buffers = payload.from_parcel(command.inputs, fds[0] if fds else None)
        payload.unpack_inputs(data, buffers, namespace, device=self.order.device, loading=self._loading)
        self._loading("")
        process_reset.resume_singletons(namespace.values(), payload.kept_values.values())
        self.group.begin(run)
        self.prober.begin(run, command.cell.filename)
        reporting.current = reporting.Reporter(run, self.order.rank, self._tell)
        displaying.current = displaying.Displayer(run, self.order.rank, self._tell)

    def _strategy(self, name: str) -> strategy_module.Strategy:
        found = strategy_module.load(name)
        if found.framework not in ("", self.framework.name):
            raise DistributedError(
                f"--strategy {name} computes with {found.framework}, and these ranks with {self.framework.name}: leave "
                "--on out, so that it is given ranks of its own."
            )
        return found()

    def _strategy_run(self, command: Execute, names: dict[str, object]) -> strategy_module.StrategyRun:
        return strategy_module.StrategyRun(
            options=command.setting.strategy_options,
            filename=command.cell.filename,
            everyone=identity.everyone(command),
            names=names,
            exchange=self.group.exchange,
            note=lambda text: self._tell(Noted(run=command.run, rank=None, text=text)),
        )

    def _take_surroundings(self, command: Execute) -> None:
        """The kernel's directory, environment and path, as they are now, and this rank's own variables."""
        setting = command.setting
        of_group = self.group.environment()
        key = setting.own_environment, setting.env, of_group
        if key != self._wanted_for:
            own = rank_environment.environment if setting.own_environment else {}
            given = identity.with_defaults({**own, **setting.env})
            self._wanted, self._wanted_for = {**given, **identity.environment(), **of_group}, key
            # The kernel's own would find no kernel here.
            if self._wanted.get("MPLBACKEND", "module:").startswith("module:"):
                self._wanted["MPLBACKEND"] = displaying.BACKEND
        rank_environment.take(setting, self._wanted)
        threads.use(self.order.threads, self._wanted)

    def _was_stopped(self, error: BaseException) -> bool:
        """Whether the cell ended because it was asked to: a collective that was cut raises whatever it likes."""
        if self.asked.is_set():
            return not isinstance(error, ValueLost)
        return interrupt_in(error) is not None and self.asked.wait(ASKED_GRACE_S)

    def _clear(self, command: Execute, namespace: dict[str, object]) -> None:
        """Between runs, after the notebook has its answer: drop the cell's own data, keep what was asked for."""
        keep = command.setting.keep
        tensors.whole.clear()
        self.framework.finish(value for name, value in namespace.items() if name not in keep)
        if keep:
            cell.keep_only(namespace, keep)
            self._kept_by = command.run
        else:
            sys.modules["__main__"] = cell.fresh_module()
            namespace.pop("get_ipython", None)  # it holds the namespace
            self._in_cycles = cell.defines_code(namespace)
        self.handlers.restore()
        self.group.tidy()
        self._littered = True

    def _tell(self, event: Event, fds: Sequence[int] = ()) -> None:
        """In one go with the start of the run, if that was not told yet; any thread. No interrupt cuts it in two."""
        mine, before = threading.current_thread() is threading.main_thread(), self._sending
        if mine:
            self._sending = True
        try:
            with self._telling:
                started, self._unannounced = self._unannounced, None
                if started is not None and isinstance(event, Returned):
                    event, started = replace(event, started=started), None
                self._send(event, fds, after=() if started is None else (started,))
        finally:
            if mine:
                self._sending = before

    def _send(self, event: Event, fds: Sequence[int] = (), after: Sequence[Event] = ()) -> None:
        """With `_telling`."""
        if self._in_send:
            self._meanwhile.append(event)
            return
        self._in_send = True
        try:
            self.link.send(event, fds, after=after)
            while self._meanwhile:
                self.link.send(self._meanwhile.pop(0))
        finally:
            self._in_send = False

    # ------------------------------------------------------------------------------------------------ other threads

    def on_interrupt(self, signum: int, frame: types.FrameType | None) -> None:
        self._unheard = self._sending or library_imports.importing_library(frame)
        if self.interruptible and not self._unheard:
            raise KeyboardInterrupt

    def _control(self) -> None:
        """Control thread: hand commands on, act on `CutSockets` at once; meanwhile, have unfinished lines be seen."""
        while True:
            while self.running and not self.link.wait(FLUSH_EVERY_S):
                process.flush_unfinished()
                if self._unheard:
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            try:
                message, fds = self.link.receive()
            except (EOFError, OSError):
                self.inbox.put(None)
                return
            if isinstance(message, CutSockets):
                self._cut(message)
            elif isinstance(message, Probe):
                self._answer(message)
            else:
                if isinstance(message, Execute):
                    self.asked.clear()
                    self._unheard = False
                    self.running = message.run  # here, so that a stop right behind it finds its run
                self.inbox.put((message, fds))
                if isinstance(message, Execute) and not self.link.wait(ANNOUNCE_S):
                    self._announce()

    def _answer(self, probe: Probe) -> None:
        if probe.run == self.running:
            self._tell(self.prober.look(deep=probe.deep))

    def _announce(self) -> None:
        with self._telling:
            if self._unannounced is not None:
                self._send(self._unannounced)
            self._unannounced = None

    def _cut(self, command: CutSockets) -> None:
        if command.run not in (self.running, self._left):
            return
        if command.stop and command.run == self.running:
            self.asked.set()
        self.group.apart = self.group.apart or self.asked.is_set() or bool(command.inodes)
        process.shut_sockets(frozenset(command.inodes))
        if command.inodes:
            self.group.abort()


def _leave() -> NoReturn:
    """Run the exit handlers and end, without waiting for threads or for C++ destructors that may hang."""
    try:
        atexit._run_exitfuncs()  # noqa: SLF001
        process.flush_streams()
    finally:
        os._exit(0)
