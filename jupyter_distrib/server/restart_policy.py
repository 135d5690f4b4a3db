"""Decides whether a run that has ended is started again (`--max-restarts`). Pure; runs in the loop of the agent, or of
the coordinator.

a rank was lost, or its device                    started again
a rank raised                                     only with `--restart-on error`
it was stopped, or ran into a time limit          never
ended twice at one place, with no step between    not again: it would go on like that
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import TypeAlias

from jupyter_distrib.errors import ValueLost
from jupyter_distrib.wire import messages as m

_NO_RANKS = "jupyter_distrib.errors.PoolError"
"""The failure type of a cell that never reached its ranks."""
_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM, None)
"""Exit codes of ranks killed from outside, which say nothing about the cell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """The decision to start the run again."""

    cause: str
    """`rank 1 was lost (killed by SIGKILL)`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoRestart:
    """The decision that the run has ended."""

    reason: str = ""
    """A sentence on why it is not restarted, if the user has asked for restarts and might expect one."""


Decision: TypeAlias = Restart | NoRestart


@dataclass(slots=True, kw_only=True)
class _Attempt:
    """The facts about one attempt."""

    lost: m.Exited | None = None
    """The first rank that was lost."""
    failed: m.Failed | None = None
    """The first failure of a rank; if any failure has broken a device, the first of these."""
    cut: bool = False
    """Whether a rank has not come to the end of the cell."""
    steps: dict[str, int] = field(default_factory=dict)
    """The highest step that was reported, by the name of the loop or number."""


class RestartPolicy:
    """The attempts of one run.

    Args:
        max_restarts: Maximum number of restarts.
        on_error: Whether an exception in the user's code also causes a restart.
        filename: Name of the cell, whose line numbers are reported.
    """

    def __init__(self, max_restarts: int, *, on_error: bool, filename: str) -> None:
        self._max_restarts, self._on_error, self._filename = max_restarts, on_error, filename
        self.attempt = 0
        """Number of restarts so far."""
        self._now, self._before = _Attempt(), _Attempt()
        self._stopped = False

    def stop(self) -> None:
        """Record that the user or a time limit has ended the run."""
        self._stopped = True

    def record(self, event: m.Event) -> None:
        """Handle an event of the run."""
        now = self._now
        now.cut = now.cut or isinstance(event, m.Exited | m.Failed | m.Interrupted)
        match event:
            case m.Exited() if not event.asked:
                now.lost = now.lost or event
            case m.Failed() if event.failure.type_name == _NO_RANKS:
                self.stop()
            case m.Failed():
                is_first = now.failed is None or (event.broke_device and not now.failed.broke_device)
                now.failed = event if is_first else now.failed
            case m.Progressed():
                now.steps[event.label] = max(event.step, now.steps.get(event.label, event.step))
            case m.Measured():
                for name in event.values:
                    now.steps[f"report {name}"] = max(event.step, now.steps.get(f"report {name}", event.step))
            case m.TimedOut():
                self.stop()
            case m.Interrupted() if now.lost is None and now.failed is None:
                self.stop()  # killed by this package: the others are interrupted after the first that ended

    @property
    def is_cut(self) -> bool:
        """Return whether the attempt has ended before the end of the cell, and nobody has stopped the run."""
        return self._now.cut and not self._stopped

    def begin_again(self) -> int | None:
        """Begin an attempt that is not due to a loss; return the highest step of the one before, if it reported any."""
        steps, self._now = self._now.steps.values(), _Attempt()
        return max(steps, default=None)

    def decide(self) -> Decision:
        """Decide at the end of an attempt; after `Restart`, the next attempt counts."""
        now, before = self._now, self._before
        cause = _loss(now.lost) if now.lost else ""
        if not cause and now.failed and (now.failed.broke_device or self._on_error):
            cause = self._error(now.failed)
        helps = now.failed and now.failed.failure.type_name.rpartition(".")[2] != ValueLost.__name__
        if not self._stopped and now.failed and helps and not cause and self._max_restarts:
            return NoRestart(
                reason=f"{self._error(now.failed)}; not started again, since --max-restarts alone is for lost ranks: "
                "add --restart-on error for exceptions too"
            )
        if self._stopped or not cause:
            return NoRestart()
        if self.attempt >= self._max_restarts:
            return NoRestart(reason=f"{cause}; not started again, since --max-restarts {self._max_restarts} is used up")
        if self.attempt and _place(now) is not None and _place(now) == _place(before) and not _goes_on(now, before):
            return NoRestart(
                reason=f"{cause}, at the same place as before and with no step in between: not started again, since it "
                "would end there each time"
            )
        self.attempt += 1
        self._now, self._before = _Attempt(), now
        return Restart(cause=cause)

    def _error(self, event: m.Failed) -> str:
        lines = [frame.line for frame in event.failure.frames if frame.filename == self._filename]
        error = event.failure.type_name.rpartition(".")[2] + (f", line {lines[-1]}" if lines else "")
        return f"rank {event.rank} " + (f"lost its GPU ({error})" if event.broke_device else f"raised {error}")


def _loss(event: m.Exited) -> str:
    return f"rank {event.rank} was lost ({_end(event)})"


def _end(event: m.Exited) -> str:
    if event.out_of_memory:
        return "killed, because memory ran out"
    if event.exit_code is None:
        return event.last_lines[-1] if event.last_lines else "its process is gone"
    if event.exit_code >= 0:
        return f"exit code {event.exit_code}"
    try:
        return f"killed by {signal.Signals(-event.exit_code).name}"
    except ValueError:
        return f"killed by signal {-event.exit_code}"


def _place(attempt: _Attempt) -> object:
    """Return where an attempt ended; None if unknown."""
    if (lost := attempt.lost) is not None:
        if lost.exit_code in _FROM_OUTSIDE and not lost.out_of_memory:
            return None
        return lost.exit_code, lost.out_of_memory, tuple((each.filename, each.line) for each in lost.frames)
    if attempt.failed is None:
        return None
    failure = attempt.failed.failure
    return failure.type_name, tuple((each.filename, each.line) for each in failure.frames)


def _goes_on(now: _Attempt, before: _Attempt) -> bool:
    """Return whether an attempt got further than the previous one."""
    return any(step > before.steps.get(name, -1) for name, step in now.steps.items())
