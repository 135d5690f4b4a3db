"""The run of a function in Spark tasks, as the notebook shows it: the lines that tasks send become events of a `Run`.
Kernel side; Spark's own code runs in a thread, since the cell's thread draws the view and handles interrupts."""

from __future__ import annotations

import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from jupyter_distrib.agent.ranks.output import RunOutput
from jupyter_distrib.compat import launching
from jupyter_distrib.compat.spark.lines import Printed, Reader
from jupyter_distrib.kernel.notebook.live_view import LiveView
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.kernel.session import session
from jupyter_distrib.kernel.session.runs.run import PoolLink, Run
from jupyter_distrib.system import paths
from jupyter_distrib.system.event_loop import Callback, Timer
from jupyter_distrib.wire import messages as m

KILL_S = 3.0
"""Seconds from the order to stop until ranks on this machine are killed."""
FROM_RANKS = (m.Started, m.Progressed, m.Measured, m.Returned, m.Failed, m.Interrupted)


class Launched:
    """One run of a distributor.

    Args:
        name: The class's name, for messages.
        ranks: The number of ranks.
        cancel: Has Spark cancel the tasks; called in any thread.
        local: Whether ranks are processes on this machine, which are stopped directly.
    """

    def __init__(self, name: str, ranks: int, *, gpus: bool, local: bool, cancel: Callable[[], None]) -> None:
        self.token = secrets.token_hex(8)
        self._name, self._local, self._cancel = name, local, cancel
        self._reader = Reader(token=self.token)
        self._lock = threading.RLock()
        self._pids: dict[int, int] = {}
        """Process ids of the running ranks, by rank."""
        self._ended = False

        def make(run_id: str) -> Run:
            record = RunRecord(run=run_id, label=f"{name}.run", ranks=range(ranks), world_size=ranks, gpus=gpus)
            return Run(record, PoolLink(pool="spark", stop=self._stop))

        self.run = session.current().run_elsewhere(make)
        logs = paths.log_directory() / self.run.id
        self._output = RunOutput(self.run.id, logs, ThreadClock(self._lock), self._deliver)

    def wait(self, call: Callable[[], Any]) -> Any:
        """Call Spark in a thread, show the run, and return the call's value.

        Raises:
            RuntimeError: It failed on a rank; the rank's own exception is the cause.
            Exception: Spark's own error, if no rank has started.
        """
        outcome: list[Any] = []
        failed: list[BaseException] = []

        def run() -> None:
            try:
                outcome.append(call())
            except BaseException as error:  # noqa: BLE001 - Spark's error, raised in the thread of the cell
                failed.append(error)
            self._end(failed[0] if failed else None)

        threading.Thread(target=run, name="jupyter_distrib-spark", daemon=True).start()
        error = self._shown()
        if failed and (error is None or not self._has_begun):
            raise failed[0]
        if error is not None:
            raise launching.failure(self._name, self.run, error) from error
        return outcome[0]

    def _shown(self) -> Exception | None:
        try:
            self.run.wait(LiveView(self.run))
        except Exception as error:  # noqa: BLE001 - the rank's own
            return error
        return None

    @property
    def _has_begun(self) -> bool:
        return any(rank.pid for rank in self.run.record.ranks.values())

    # ------------------------------------------------------------------------------------------------ from the ranks

    def knows(self, line: str) -> bool:
        """Return whether a line is from a rank of this run: it has the token."""
        return self._reader.knows(line)

    def read(self, line: str, rank: int = 0) -> int:
        """Process a line of a task; unmarked lines are attributed to `rank`. Return the rank of the line."""
        with self._lock:
            match self._reader.read(line):
                case Printed() as text:
                    rank = text.rank if text.rank >= 0 else rank
                    if rank in self.run.record.ranks and not self._ended:
                        self._output.write(rank, text.stream, text.text.encode())
                case event if isinstance(event, FROM_RANKS) and event.rank in self.run.record.ranks:
                    self._on_event(event, rank := event.rank or 0)
        return rank

    def _on_event(self, event: Any, rank: int) -> None:
        match event:
            case m.Started():
                self._pids[rank] = event.pid
            case m.Returned() | m.Failed() | m.Interrupted():
                self._pids.pop(rank, None)
                self._output.flush()
        self._deliver(replace(event, at_s=time.monotonic()))  # its time is from the clock of another machine

    def _deliver(self, event: m.RunEvent) -> None:
        if not self._ended:
            self.run.deliver(event)

    # ------------------------------------------------------------------------------------------------ its end

    def _stop(self, force: bool) -> None:
        """Stop the ranks; called in a SIGINT handler, which must wait neither for locks nor for Spark."""
        self._signal(signal.SIGKILL if force else signal.SIGINT)
        if not force:
            kill = threading.Timer(KILL_S, self._signal, [signal.SIGKILL])
            kill.daemon = True
            kill.start()
        threading.Thread(target=self._cancel, name="jupyter_distrib-cancel", daemon=True).start()

    def _signal(self, number: int) -> None:
        for pid in list(self._pids.values()) if self._local else ():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _end(self, error: BaseException | None) -> None:
        """End the ranks that have not reported their end, and the run."""
        with self._lock:
            self._output.flush()
            failed = any(rank.failure is not None for rank in self.run.record.ranks.values())
            for number, rank in self.run.record.ranks.items():
                if not rank.finished:
                    self._deliver(self._last(number, rank.pid, error, is_cause=not failed))
            self._output.close()
            log_directory = self._output.log_directory
            self._deliver(m.Ended(run=self.run.id, at_s=time.monotonic(), log_directory=log_directory))
            self._ended = True

    def _last(self, rank: int, pid: int, error: BaseException | None, *, is_cause: bool) -> m.RunEvent:
        run, at_s = self.run.id, time.monotonic()
        if error is None:
            return m.Returned(run=run, rank=rank, value=None, at_s=at_s)
        if self.run.interrupted:
            return m.Interrupted(run=run, rank=rank, frames=(), at_s=at_s)
        lines: Sequence[str] = str(error).strip().splitlines()[:1]
        asked = not (is_cause and pid)
        return m.Exited(
            run=run,
            rank=rank,
            pid=pid,
            exit_code=None,
            asked=asked,
            reason="" if pid else "Spark did not begin it",
            last_lines=tuple(lines),
            at_s=at_s,
        )


class ThreadClock:
    """Replaces the event loop that `RunOutput` needs by threads; callbacks run with the lock held."""

    def __init__(self, lock: threading.RLock) -> None:  # type: ignore[valid-type, unused-ignore]
        self._lock = lock

    def later(self, delay_s: float, call: Callback) -> Timer:
        timer = Timer(call)

        def due() -> None:
            with self._lock:  # type: ignore[attr-defined, unused-ignore]
                if timer.call is not None:
                    timer.call()

        thread = threading.Timer(delay_s, due)
        thread.daemon = True
        thread.start()
        return timer
