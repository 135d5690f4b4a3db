"""Ranks without processes: every rank of a cell runs in the notebook's own process, one after another, in the thread
that sends it.

For looking into a cell: `input()`, `breakpoint()` and the interrupt button work as in any cell. For tests: no process,
no torch, no waiting. A cell sees copies of what it captured and the same surroundings as on other pools, but there is
no process group, so ranks cannot meet in a collective.

    send(Execute) -> for each rank: Started, the cell, Returned | Failed | Interrupted -> Ended -> send returns

What a cell prints goes where the notebook's own output goes, at once, and into the record as well (`_Tee`). The process
is left as it was found (`_restored`). Modules are those that the notebook has imported; a file that was edited since is
not imported again.
"""

from __future__ import annotations

import ctypes
import io
import os
import platform
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

from jupyter_distrib import paths, payload, reporting
from jupyter_distrib.agent.loop import Callback, Timer
from jupyter_distrib.agent.output import RunOutput
from jupyter_distrib.errors import PoolError
from jupyter_distrib.events import (
    Answered,
    Ask,
    Attach,
    CloseCrew,
    Command,
    CrewClosed,
    CrewOpened,
    CrewRefused,
    Ended,
    Execute,
    Exited,
    Failed,
    Forget,
    Hello,
    Interrupted,
    NotAttached,
    OpenCrew,
    Returned,
    RunEvent,
    Started,
    Stop,
    TimedOut,
    Welcomed,
    WorkerInfo,
    WorkerOrder,
)
from jupyter_distrib.pools import Lost, Sink
from jupyter_distrib.worker import cell, identity, strategies, surroundings
from jupyter_distrib.worker.outcome import outcome

DEFAULT_RANKS = 2
MAX_RANKS = 1000

Outcome = Returned | Failed | Interrupted


class InlinePool:
    """This process."""

    kind = "inline"
    meaningless: ClassVar = {
        "hang_timeout_s": "its ranks run one after another, so none waits for another",
        "check": "its ranks run one after another, so there are no collectives",
        "wait_s": "its ranks are never busy with something else",
    }

    def connect(self, hello: Hello, sink: Sink, lost: Lost) -> InlineNode:
        node = InlineNode(hello, sink)
        sink(
            Welcomed(
                pid=os.getpid(), python=platform.python_version(), torch=hello.torch, cloudpickle=hello.cloudpickle
            ),
            (),
        )
        return node


@dataclass(slots=True, kw_only=True, eq=False)
class _Crew:
    """Ranks that exist as orders and kept values only."""

    orders: dict[int, WorkerOrder]
    kept: dict[int, dict[str, object]] = field(default_factory=dict)
    """By rank, what `payload.kept_values` holds while that rank executes a cell."""

    def infos(self) -> tuple[WorkerInfo, ...]:
        return tuple(WorkerInfo(rank=rank, pid=os.getpid(), device="cpu") for rank in self.orders)


class InlineNode:
    """Executes cells in the thread that calls `send`, which returns when the run has ended."""

    def __init__(self, hello: Hello, sink: Sink) -> None:
        self._hello, self._sink = hello, sink
        self._crews: dict[str, _Crew] = {}
        self._busy = threading.Lock()
        self._run: _InlineRun | None = None
        self._started_s = time.monotonic()

    def send(self, command: Command, fds: Sequence[int] = ()) -> None:
        """See `Node.send`; an `Execute` blocks.

        Raises:
            PoolError: This pool cannot do what the cell asks for; nothing was executed, and the run has ended.
        """
        match command:
            case OpenCrew():
                self._sink(self._open(command), ())
            case Execute():
                self._execute(command, fds)
            case Stop():
                if (run := self._run) is not None and run.command.run == command.run:
                    run.stop()
            case Forget():
                self._forget(command)
            case CloseCrew():
                if self._crews.pop(command.crew, None) is not None:
                    self._sink(CrewClosed(crew=command.crew), ())
            case Ask():
                self._sink(Answered(question=command.question, answer=self._answer()), ())
            case Attach():
                self._sink(NotAttached(run=command.run, reason="the inline pool has no detached runs."), ())

    def close(self) -> None:
        self._crews.clear()

    def _open(self, command: OpenCrew) -> CrewOpened | CrewRefused:
        size = command.size or DEFAULT_RANKS
        if command.load_env:
            names = ", ".join(command.load_env)
            reason = f"{names}: read when a program loads, too late for this process. Use --pool local."
            return CrewRefused(crew=command.crew, reason=reason)
        if command.gpu_type:
            reason = f"--gpu-type {command.gpu_type}, but the inline pool has no GPU; use another pool."
            return CrewRefused(crew=command.crew, reason=reason)
        if not 0 < size <= MAX_RANKS:
            return CrewRefused(crew=command.crew, reason=f"the inline pool has 1 to {MAX_RANKS} ranks, not {size}.")
        crew = _Crew(orders={order.rank: order for order in _orders(command, size)})
        self._crews[command.crew] = crew
        return CrewOpened(crew=command.crew, workers=crew.infos(), gpus=False)

    def _execute(self, command: Execute, fds: Sequence[int]) -> None:
        try:
            crew = self._crews.get(command.crew)
            if crew is None:
                return self._tell_no_crew(command)
            run = _InlineRun(command, crew, self._sink, fds)
            if reason := self._cannot(command):
                run.end()
                raise PoolError(reason)
            if not self._busy.acquire(blocking=False):
                run.end()
                raise PoolError("the inline pool runs one cell at a time, and one is still running.")
            try:
                self._run = run
                run.execute()
            finally:
                self._run = None
                self._busy.release()
        finally:
            for fd in fds:
                os.close(fd)

    def _cannot(self, command: Execute) -> str:
        strategy = command.setting.strategy
        if strategy != "none":
            return (
                f"--strategy {strategy} needs ranks that run at the same time, and the inline pool runs one after "
                "another: use --pool local, or --strategy none."
            )
        if command.detached:
            return (
                "the inline pool runs a cell in the notebook's own thread, so it cannot go on without it: "
                "leave out --detach, or use --pool local."
            )
        return ""

    def _tell_no_crew(self, command: Execute) -> None:
        now = time.monotonic()
        for rank in command.ranks:
            self._sink(Exited(run=command.run, rank=rank, pid=0, exit_code=None, asked=False, at_s=now), ())
        self._sink(Ended(run=command.run, at_s=now), ())

    def _forget(self, command: Forget) -> None:
        if (crew := self._crews.get(command.crew)) is not None:
            for kept in crew.kept.values():
                for key in command.keys:
                    kept.pop(key, None)

    def _answer(self) -> dict[str, object]:
        run = self._run.command if self._run else None
        return {
            "pid": os.getpid(),
            "up_s": time.monotonic() - self._started_s,
            "template": "not needed",
            "crews": tuple(
                {
                    "crew": name,
                    "holder": self._hello.label,
                    "session": self._hello.session,
                    "workers": crew.infos(),
                    "run": run.run if run and run.crew == name else "",
                    "label": run.label if run and run.crew == name else "",
                    "kept": {key: 0.0 for kept in crew.kept.values() for key in kept},
                }
                for name, crew in self._crews.items()
            ),
            "detached": (),
            "gpus": (),
        }


def _orders(command: OpenCrew, size: int) -> Iterator[WorkerOrder]:
    for local_rank in range(size):
        yield WorkerOrder(
            crew=command.crew,
            worker=f"{command.crew}.{local_rank}",
            agent_pid=os.getpid(),
            rank=command.first_rank + local_rank,
            world_size=command.world_size or size,
            local_rank=local_rank,
            local_world_size=size,
        )


# ------------------------------------------------------------------------------------------------ one run


class _InlineRun:
    """One cell on some ranks of a crew."""

    def __init__(self, command: Execute, crew: _Crew, sink: Sink, fds: Sequence[int]) -> None:
        self.command = command
        self._crew, self._sink, self._fds = crew, sink, fds
        self._interrupts = _Interrupts()
        self._clock = _Clock()
        self._output = RunOutput(command.run, paths.log_directory() / command.run, self._clock, self._tell)
        self._lock = threading.RLock()
        self._over = False

    def execute(self) -> None:
        """Every rank, one after another; none is begun once the run was asked to stop."""
        limit_s = self.command.timeout_s
        timer = None if limit_s is None else threading.Timer(limit_s, self._time_out, [limit_s])
        with self._interrupts.taken():
            if timer is not None:
                timer.daemon = True
                timer.start()
            for rank in self.command.ranks:
                if (order := self._crew.orders.get(rank)) is not None:
                    self._execute_rank(order)
            if timer is not None:
                timer.cancel()
            self.end()

    def stop(self) -> None:
        """Have the cell raise `KeyboardInterrupt`; from any thread."""
        self._interrupts.ask()

    def end(self) -> None:
        """Say that the run has ended; what its threads still report is dropped."""
        self._output.close()
        self._tell(Ended(run=self.command.run, at_s=time.monotonic(), log_directory=self._output.log_directory))
        self._over = True

    def _time_out(self, limit_s: float) -> None:
        self._tell(TimedOut(run=self.command.run, limit_s=limit_s, at_s=time.monotonic()))
        self.stop()

    def _tell(self, event: RunEvent, fds: Sequence[int] = ()) -> None:
        with self._lock:
            if not self._over:
                self._sink(event, fds)

    def _execute_rank(self, order: WorkerOrder) -> None:
        run, rank = self.command.run, order.rank
        if self._interrupts.asked:
            return self._tell(Interrupted(run=run, rank=rank, frames=(), at_s=time.monotonic()))
        self._tell(Started(run=run, rank=rank, pid=os.getpid(), device="cpu", at_s=time.monotonic()))
        with identity.taken(order), self._kept_values(rank):
            event, fds = self._outcome(rank)
        self._output.flush()
        self._tell(event, fds)

    def _outcome(self, rank: int) -> tuple[Outcome, list[int]]:
        """Nothing that user code raises gets past this."""
        command, module = self.command, cell.fresh_module()
        with _restored(), self._recorded(rank):
            value, error = self._guarded(module)
            event, fds = outcome(command, rank, module.__dict__, value, error, stopped=self._interrupts.caused)
        if command.setting.keep:
            cell.keep_only(module.__dict__, command.setting.keep)
        return event, fds

    def _guarded(self, module: types.ModuleType) -> tuple[Any, BaseException | None]:
        """The cell's value, or what it raised."""
        try:
            with self._interrupts.allowed():
                self._prepare(module)
                return cell.execute(self.command.cell, module.__dict__), None
        except BaseException as error:  # noqa: BLE001 - foreign code, and SystemExit and KeyboardInterrupt with it
            return None, error
        finally:
            reporter, reporting.current = reporting.current, None
            if reporter is not None:
                reporter.close()

    def _prepare(self, module: types.ModuleType) -> None:
        command, namespace = self.command, module.__dict__
        surroundings.take(command.setting, _environment(command.setting.env))
        sys.modules["__main__"] = module
        namespace |= surroundings.provided(namespace)
        data, buffers = payload.from_parcel(command.inputs, os.dup(self._fds[0]) if self._fds else None)
        payload.unpack_inputs(data, buffers, namespace, device="cpu")
        identity.strategy = strategies.load("none")()
        reporting.current = reporting.Reporter(command.run, identity.rank(), self._tell)

    @contextmanager
    def _kept_values(self, rank: int) -> Iterator[None]:
        """What this rank has kept is what `payload.kept_value` finds meanwhile."""
        before = dict(payload.kept_values)
        payload.kept_values.clear()
        payload.kept_values.update(self._crew.kept.get(rank, {}))
        try:
            yield
        finally:
            self._crew.kept[rank] = dict(payload.kept_values)
            payload.kept_values.clear()
            payload.kept_values.update(before)

    @contextmanager
    def _recorded(self, rank: int) -> Iterator[None]:
        """Everything that Python prints goes on where it went before, and into the run's record and logs."""

        def write(stream: str, text: str) -> None:
            with self._lock:
                if not self._over:
                    self._output.write(rank, stream, text.encode("utf-8", "backslashreplace"))
                    self._clock.check()

        tees = {name: _Tee(getattr(sys, name), name, write) for name in ("stdout", "stderr")}
        for name, tee in tees.items():
            setattr(sys, name, tee)
        try:
            yield
        finally:
            for tee in tees.values():
                tee.finish()


def _environment(kernel: dict[str, str]) -> dict[str, str]:
    """As torchrun sets them, except that there is nobody to meet; which GPUs CUDA sees must not change in a process
    that may use them already."""
    wanted = {**kernel, **identity.environment()}
    for name in ("MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"):
        wanted.pop(name, None)
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return wanted if chosen is None else {**wanted, "CUDA_VISIBLE_DEVICES": chosen}


@contextmanager
def _restored() -> Iterator[None]:
    """Whatever the cell does to the process's surroundings is undone."""
    main, env, argv, path = sys.modules["__main__"], dict(os.environ), list(sys.argv), list(sys.path)
    streams = sys.stdin, sys.stdout, sys.stderr
    directory = _directory()
    try:
        yield
    finally:
        sys.stdin, sys.stdout, sys.stderr = streams
        sys.modules["__main__"] = main
        sys.argv[:], sys.path[:] = argv, path
        for name in os.environ.keys() - env.keys():
            del os.environ[name]
        for name, value in env.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
        if directory:
            with suppress(OSError):  # the cell has removed it
                os.chdir(directory)


def _directory() -> str:
    try:
        return os.getcwd()
    except OSError:
        return ""


class _Tee(io.TextIOBase):
    """A standard stream that is recorded until the cell has ended; after that (a handler may keep it) it is the stream
    it stands for."""

    def __init__(self, stream: Any, name: str, record: Callable[[str, str], None]) -> None:
        self._stream, self._name = stream, name
        self._record: Callable[[str, str], None] | None = record

    def __getattr__(self, name: str) -> Any:  # `buffer`, `encoding`, and what IPython's own stream has
        return getattr(self._stream, name)

    def fileno(self) -> int:
        return int(self._stream.fileno())

    def isatty(self) -> bool:
        return bool(self._stream.isatty())

    def writable(self) -> bool:
        return True

    def flush(self) -> None:
        self._stream.flush()

    def write(self, text: str) -> int:
        count = int(self._stream.write(text) or 0)
        if self._record is not None:
            self._record(self._name, text)
        return count

    def finish(self) -> None:
        self._record = None
        with suppress(Exception):  # the cell may have closed it
            self._stream.flush()

    def close(self) -> None:
        """Not the notebook's own stream."""


class _Clock:
    """What `RunOutput` wants of a loop, for a thread that has none: what is due is called at the next write."""

    def __init__(self) -> None:
        self._due: list[tuple[float, Timer]] = []

    def later(self, delay_s: float, call: Callback) -> Timer:
        timer = Timer(call)
        self._due.append((time.monotonic() + delay_s, timer))
        return timer

    def check(self) -> None:
        now = time.monotonic()
        due = [timer for at_s, timer in self._due if at_s <= now]
        self._due = [(at_s, timer) for at_s, timer in self._due if at_s > now and timer.call is not None]
        for timer in due:
            if timer.call is not None:
                timer.call()


class _Interrupts:
    """Lets an interrupt into the cell, and keeps it out of the code around it, which then notices that it came.

    In the main thread the notebook's own handler of SIGINT stays what is called; it merely has to wait. Another thread
    has no signals: there `ask` raises the exception at the cell's next line.
    """

    def __init__(self) -> None:
        self.asked = False
        self._inside = False
        self._thread = threading.get_ident()
        self._main = threading.current_thread() is threading.main_thread()
        self._lock = threading.RLock()

    def ask(self) -> None:
        """Stop the run; from any thread."""
        with self._lock:
            self.asked = True
            if not self._inside or threading.get_ident() == self._thread:
                return
            if self._main:
                signal.pthread_kill(self._thread, signal.SIGINT)
            else:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._thread), ctypes.py_object(KeyboardInterrupt)
                )

    def caused(self, error: BaseException) -> bool:
        """Whether an exception of the cell came of an interrupt, which then ends the run."""
        self.asked = self.asked or isinstance(error, KeyboardInterrupt)
        return self.asked

    @contextmanager
    def taken(self) -> Iterator[None]:
        """While the run lasts."""
        before = signal.getsignal(signal.SIGINT) if self._main else None
        if not callable(before):  # ignored, or another thread's business
            yield
            return

        def handle(signum: int, frame: types.FrameType | None) -> None:
            if self._inside:
                before(signum, frame)
            else:
                self.asked = True

        signal.signal(signal.SIGINT, handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """While the cell's own code runs."""
        try:
            self._inside = True
            if self.asked:
                raise KeyboardInterrupt
            yield
        finally:
            self._inside = False
            with self._lock:  # whoever is about to interrupt the cell has done so
                pass
