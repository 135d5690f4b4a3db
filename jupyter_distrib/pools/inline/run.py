"""Runs one cell on ranks that have no processes: one rank after another, in the thread that sends it.

What a cell prints goes where the notebook's own output goes, at once, and into the record as well (`_Tee`). The state
of the process is restored afterwards (`_restored`). Modules are the ones that the notebook has imported; a file
that was edited since is not imported again.
"""

from __future__ import annotations

import io
import os
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from jupyter_distrib.agent.ranks.output import RunOutput
from jupyter_distrib.cells import cell
from jupyter_distrib.interfaces import identity, strategy
from jupyter_distrib.pools.base import Sink
from jupyter_distrib.pools.inline.cell_interrupts import CellInterrupts
from jupyter_distrib.serialization import payload
from jupyter_distrib.system import paths
from jupyter_distrib.system.event_loop import Callback, Timer
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.descriptors import NO_DESCRIPTORS, Descriptors
from jupyter_distrib.worker.debugging import probe
from jupyter_distrib.worker.environment import rank_environment
from jupyter_distrib.worker.output import reporting
from jupyter_distrib.worker.process.outcome import outcome

Outcome = m.Returned | m.Failed | m.Interrupted


@dataclass(slots=True, kw_only=True, eq=False)
class InlineWorkerGroup:
    """Ranks that exist only as orders and kept values."""

    orders: dict[int, m.WorkerOrder]
    kept: dict[int, dict[str, object]] = field(default_factory=dict)
    """Values that `payload.kept_values` holds while a rank executes a cell, by rank."""

    def infos(self) -> tuple[m.WorkerInfo, ...]:
        return tuple(m.WorkerInfo(rank=rank, pid=os.getpid(), device="cpu") for rank in self.orders)


class InlineRun:
    """One cell on some ranks of a worker group."""

    def __init__(self, command: m.Execute, group: InlineWorkerGroup, sink: Sink, fds: Sequence[int]) -> None:
        self.command = command
        self._group, self._sink, self._fds = group, sink, fds
        self._interrupts = CellInterrupts()
        self._clock = _Clock()
        logs = paths.log_directory()
        self._output = RunOutput(command.run, logs / command.run, self._clock, self._emit)
        self._lock = threading.RLock()
        self._over = False
        self._rank: int | None = None
        """The rank that executes the cell."""

    def execute(self) -> None:
        """Execute the cell on one rank after another; start no further rank once a stop was requested."""
        limit_s = self.command.timeout_s
        timer = None if limit_s is None else threading.Timer(limit_s, self._time_out, [limit_s])
        with self._interrupts.taken():
            if timer is not None:
                timer.daemon = True
                timer.start()
            self._execute_ranks([self._group.orders[rank] for rank in self.command.ranks if rank in self._group.orders])
            if timer is not None:
                timer.cancel()
            self.end()

    def _execute_ranks(self, orders: Sequence[m.WorkerOrder]) -> None:
        for order in orders:
            self._execute_rank(order, self._interrupts)

    def stop(self) -> None:
        """Have the cell raise `KeyboardInterrupt`; from any thread."""
        self._interrupts.ask()

    def show_stack(self) -> None:
        """Report the stack of the rank that is executing the cell; from any thread."""
        if (rank := self._rank) is not None:
            self._emit(probe.stack_of_main_thread(self.command.run, rank))

    def end(self) -> None:
        """Report that the run has ended; later reports of its threads are dropped."""
        self._output.close()
        self._emit(m.Ended(run=self.command.run, at_s=time.monotonic(), log_directory=self._output.log_directory))
        self._over = True

    def _time_out(self, limit_s: float) -> None:
        self._emit(m.TimedOut(run=self.command.run, limit_s=limit_s, at_s=time.monotonic()))
        self.stop()

    def _emit(self, event: m.RunEvent, descriptors: Descriptors = NO_DESCRIPTORS) -> None:
        with self._lock:
            if self._over:
                descriptors.close()
            else:
                self._sink(event, descriptors)

    def _execute_rank(self, order: m.WorkerOrder, interrupts: CellInterrupts) -> None:
        run, rank = self.command.run, order.rank
        if interrupts.asked:
            return self._emit(m.Interrupted(run=run, rank=rank, frames=(), at_s=time.monotonic()))
        began_at_s = time.monotonic()
        self._emit(m.Started(run=run, rank=rank, pid=os.getpid(), device="cpu", at_s=began_at_s))
        self._rank = rank
        with identity.assumed(order), self._kept_values(rank):
            event, fds = self._outcome(rank, began_at_s, interrupts)
        self._rank = None
        self._output.flush()
        self._emit(event, Descriptors(fds))

    def _outcome(self, rank: int, began_at_s: float, interrupts: CellInterrupts) -> tuple[Outcome, list[int]]:
        """Execute the cell on one rank; no exception of user code leaves this method."""
        command, module = self.command, cell.fresh_module()
        with _restored(), self._recorded(rank):
            value, error = self._guarded(module, interrupts)
            event, fds = outcome(
                command,
                rank,
                module.__dict__,
                value,
                error,
                began_at_s=began_at_s,
                stopped=interrupts.caused,
            )
        if command.setting.keep:
            cell.keep_only(module.__dict__, command.setting.keep)
        return event, fds

    def _guarded(self, module: types.ModuleType, interrupts: CellInterrupts) -> tuple[Any, BaseException | None]:
        """Return the cell's value, or the exception that it raised."""
        try:
            with interrupts.allowed():
                self._prepare(module)
                identity.cell.begun = True
                value = cell.execute(self.command.cell, module.__dict__)
                return None if self.command.cell.script else value, None
        except BaseException as error:  # noqa: BLE001 - foreign code, and SystemExit and KeyboardInterrupt with it
            return None, error
        finally:
            if (reporter := identity.cell.reporter) is not None:
                identity.cell.reporter = None
                reporter.close()

    def _prepare(self, module: types.ModuleType) -> None:
        command, namespace = self.command, module.__dict__
        rank_environment.apply(command.setting, _environment(command.setting.env))
        sys.modules["__main__"] = module
        namespace |= rank_environment.names(command, namespace)
        cell.add_sources(command.cell)
        fds = list(map(os.dup, self._fds))
        data, buffers = payload.from_parcel(command.inputs, fds[0] if fds else None, fds[1:])
        payload.unpack_inputs(data, buffers, namespace, device="cpu")
        reporter = reporting.Reporter(command.run, identity.rank(), self._emit)
        identity.cell = identity.CellState(strategy=strategy.load("none")(), reporter=reporter)

    @contextmanager
    def _kept_values(self, rank: int) -> Iterator[None]:
        """Make `payload.kept_value` return the values kept on this rank, within the block."""
        before = dict(payload.kept_values)
        payload.kept_values.clear()
        payload.kept_values.update(self._group.kept.get(rank, {}))
        try:
            yield
        finally:
            self._group.kept[rank] = dict(payload.kept_values)
            payload.kept_values.clear()
            payload.kept_values.update(before)

    @contextmanager
    def _recorded(self, rank: int) -> Iterator[None]:
        """Copy Python's output into the run's record and logs, besides its usual destination."""

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
    """Return the rank's environment variables: those of torchrun, without the rendezvous; a process that may already
    use GPUs must keep its choice of them."""
    wanted = {**kernel, **identity.environment()}
    for name in ("MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"):
        wanted.pop(name, None)
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return wanted if chosen is None else {**wanted, "CUDA_VISIBLE_DEVICES": chosen}


@contextmanager
def _restored() -> Iterator[None]:
    """Undo the cell's changes to the state of the process."""
    main, env, argv, path = sys.modules["__main__"], dict(os.environ), getattr(sys, "argv", None), list(sys.path)
    streams = sys.stdin, sys.stdout, sys.stderr
    directory = _directory()
    try:
        yield
    finally:
        sys.stdin, sys.stdout, sys.stderr = streams
        sys.modules["__main__"] = main
        sys.argv, sys.path[:] = argv, path  # type: ignore[assignment]  # the notebook may have set it to anything
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
    """A standard stream that is recorded until the cell has ended; afterwards (a handler may keep it) it only writes to
    the original stream."""

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
        """Keep the notebook's own stream open."""


class _Clock:
    """A substitute for the loop that `RunOutput` needs, in a thread without one: due calls run at the next write."""

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
