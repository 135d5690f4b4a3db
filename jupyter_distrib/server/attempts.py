"""Restarts a run when a rank is lost (`--max-restarts`), or when there is room for more ranks (`--ranks 2:8`): keeps
the command and the parcel until the last attempt has ended. Runs in the loop of the agent, or of the coordinator.

    Execute --> attempt 0 --> events --> client      its end is reported as Restarted, and the run begins again as
                                                     soon as the worker group has replaced its ranks
            --> attempt 1 --> events --> client      the end of the last attempt is reported as it is
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from jupyter_distrib.server.growth import Growth
from jupyter_distrib.server.restart_policy import Restart, RestartPolicy
from jupyter_distrib.server.worker_group import Emit, PendingCell
from jupyter_distrib.system.formatting import duration
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.descriptors import Descriptors


class Attempts:
    """The attempts of one run.

    Args:
        command: The command to execute.
        parcel: The descriptors of its inputs.
        emit: Sends events of the run.
        execute: Executes a command on the worker group, now or when its ranks are ready; returns whether there is one.
        soon: Calls a function once all pending events are handled: the worker group repairs itself meanwhile.
        on_over: Called with the run's id when the last attempt has ended.
        growth: Decides when the run gets more ranks; None for a run that does not grow.
    """

    def __init__(
        self,
        command: m.Execute,
        parcel: Descriptors,
        emit: Emit,
        *,
        execute: Callable[[m.Execute, Descriptors, Emit], bool],
        soon: Callable[[Callable[[], None]], None],
        on_over: Callable[[str], object],
        growth: Growth | None = None,
    ) -> None:
        self.command = command
        self._parcel = Descriptors(parcel.take())
        self._emit, self._execute, self._soon, self._on_over = emit, execute, soon, on_over
        self._policy = RestartPolicy(
            command.max_restarts, on_error=command.restart_on_error, filename=command.cell.filename
        )
        self._growth = growth
        self._number = 0
        """Number of attempts before this one."""
        self._began_s = time.monotonic()
        self._stopped = self._began = False

    def start(self) -> None:
        """Start the next attempt; if the run was stopped meanwhile, or has no ranks any more, end it."""
        command = replace(self.command, attempt=self._number, timeout_s=self._time_left_s())
        # The first attempt has read the descriptor that shows how much of the content is there; all of it is there
        # since.
        needed = self.command.inputs.memories if self._number else None
        copies = Descriptors.duplicates([*self._parcel][:needed])
        if self._growth is not None:
            self._growth.begin(len(command.ranks))
        if not self._stopped and self._execute(command, copies, self.send):
            return
        pending = PendingCell(command=command, descriptors=copies, emit=self.send)
        pending.cancel() if self._stopped else pending.fail("the run cannot go on: its ranks were ended.")

    def stop(self) -> None:
        """Record that the user stops the run."""
        self._stopped = True
        self._policy.stop()
        if self._growth is not None:
            self._growth.close()

    def send(self, event: m.Event, fds: tuple[int, ...]) -> None:
        """Send an event of the run, except the end of an attempt that is followed by another."""
        if self._growth is not None:
            self._growth.follow(event)
        if isinstance(event, m.Saved):
            return
        self._policy.record(event)
        if isinstance(event, m.RanksReduced):
            self.command = replace(self.command, ranks=event.ranks)
        self._began = self._began or isinstance(event, m.Started | m.Returned | m.Failed)
        if not isinstance(event, m.Ended):
            return self._emit(event, fds)
        if not self._began and len(self._parcel) > self.command.inputs.memories:
            self._policy.stop()  # part of the content may not have come from the notebook
        if (growth := self._growth) is not None and growth.ending and self._policy.is_cut:
            return self._grow(growth)
        decision = self._policy.decide()
        if isinstance(decision, Restart):
            return self._start_again(decision.cause)
        if growth is not None:
            growth.close()
        if decision.reason:
            self._emit(m.Noted(run=self.command.run, rank=None, text=decision.reason), ())
        self._parcel.close()
        self._on_over(self.command.run)
        self._emit(event, fds)

    def _grow(self, growth: Growth) -> None:
        """Start the next attempt with as many ranks as there is room for."""
        place = "" if (step := self._policy.begin_again()) is None else f"at step {step}, "
        self.command = replace(self.command, ranks=tuple(range(growth.room)))
        cause = f"{place}and resumes from its checkpoint of {duration(growth.age_s)} ago"
        self._start_again(cause, self.command.ranks, growth.nodes)

    def _start_again(self, cause: str, ranks: tuple[int, ...] = (), nodes: int = 0) -> None:
        self._number += 1
        restarted = m.Restarted(
            run=self.command.run,
            attempt=self._policy.attempt,
            max_restarts=self.command.max_restarts,
            cause=cause,
            ranks=ranks,
            nodes=nodes,
            at_s=time.monotonic(),
        )
        self._emit(restarted, ())
        self._soon(self.start)

    def _time_left_s(self) -> float | None:
        limit_s = self.command.timeout_s
        return None if limit_s is None else max(0.001, limit_s - (time.monotonic() - self._began_s))
