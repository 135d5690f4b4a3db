"""The functions `report` and `progress`, by which a running cell sends numbers to the notebook. Loaded in kernel and
ranks; standard library only.

In a rank the worker puts a `Reporter` into `identity.cell`; anywhere else there is none and both calls are harmless.

A tensor on a device is copied to the host asynchronously, and becomes a number when the copy has arrived: a report does
not wait for the device.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from jupyter_distrib.interfaces import identity
from jupyter_distrib.wire import messages as m

if TYPE_CHECKING:
    from jupyter_distrib.worker.host_copy import HostCopy

T = TypeVar("T")

SEND_EVERY_S = 0.05
"""Shortest interval between messages in seconds: reports that come faster are sent together; none is dropped."""
CLOSE_WAIT_S = 1.0
"""Maximum seconds that the end of a run waits for tensors from the device; later ones are not shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Report:
    """One call of `report`, until all of its numbers are on the host."""

    values: Mapping[str, float | HostCopy]
    step: int
    at_s: float

    def is_ready(self, wait_s: float = 0.0) -> bool:
        """Return whether all numbers have arrived, after waiting for at most `wait_s` each; a number that will never
        arrive, because its device has failed, counts as arrived."""
        with suppress(Exception):  # an error of torch, from a device that has failed
            return all(isinstance(value, (float, int)) or value.has_come(wait_s) for value in self.values.values())
        return True

    def numbers(self) -> dict[str, float]:
        values = {}
        for name, value in self.values.items():
            if isinstance(value, (float, int)):
                values[name] = value
                continue
            with suppress(Exception):
                if value.is_there():
                    values[name] = float(value.read())
        return values


class Reporter:
    """Sends the reports of one rank in one run; may be called from any thread of the rank."""

    def __init__(
        self,
        run: str,
        rank: int,
        send: Callable[[m.Measured | m.Progressed | m.Saving | m.Saved], None],
        *,
        grows: bool = False,
    ) -> None:
        self._run, self._rank, self._send, self._grows = run, rank, send, grows
        self._lock, self._sending = threading.RLock(), threading.RLock()
        """Locks for counting and for sending reports in order; reentrant, since a finalizer may report in the middle of
        either."""
        self._is_sending = False
        """Whether the thread that holds `_sending` is in the middle of sending."""
        self._waiting: deque[_Report] = deque()
        self._positions: dict[str, tuple[int, int | None, float]] = {}
        """Step, total and time of the last progress report, by label."""
        self._sent_at_s = float("-inf")
        self._timer: threading.Timer | None = None
        self._steps = 0
        self._folders: set[str] = set()
        """Checkpoint folders that were reported."""
        self._resumed: set[str] = set()
        """Checkpoint folders from which the cell resumes."""
        self._closed = False

    @property
    def run(self) -> str:
        return self._run

    def measured(self, values: Mapping[str, float | HostCopy], step: int | None) -> None:
        with self._lock:
            number = self._steps if step is None else step
            self._steps = number + 1
        self._waiting.append(_Report(values=values, step=number, at_s=time.monotonic()))
        self._soon()

    def progressed(self, label: str, step: int, total: int | None) -> None:
        self._positions[label] = step, total, time.monotonic()
        self._soon()

    def saves_into(self, folder: str) -> None:
        """Report once the folder into which the cell saves, in case nothing else is left of the run."""
        if folder not in self._folders:
            self._folders.add(folder)
            self._send(m.Saving(run=self._run, rank=self._rank, folder=folder, at_s=time.monotonic()))

    def resumes_from(self, folder: str) -> None:
        """Record that the cell resumes from the newest checkpoint in this folder."""
        self._resumed.add(folder)

    def saved(self, folder: str) -> None:
        """Report that a checkpoint in the folder is complete, if the run may be started again from it with more
        ranks."""
        if self._grows and folder in self._resumed:
            self._send(m.Saved(run=self._run, rank=self._rank, at_s=time.monotonic()))

    def flush(self) -> None:
        """Send the waiting reports, after any that another thread is already sending."""
        with self._sending:
            self._send_all()

    def close(self) -> None:
        """Send the remaining reports; called before the rank reports that it has returned."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._waiting:
            self._waiting[-1].is_ready(CLOSE_WAIT_S)
        self.flush()

    def _send_all(self) -> None:
        """Send all waiting reports, with `_sending` held."""
        if self._is_sending:
            return  # a finalizer reports in the middle of a send: its report is sent below
        self._is_sending = True
        try:
            self._sent_at_s, self._timer = time.monotonic(), None
            while self._waiting and (self._closed or self._waiting[0].is_ready()):
                self._send_report(self._waiting.popleft())
            for label in list(self._positions):
                step, total, at_s = self._positions.pop(label)
                self._send(m.Progressed(run=self._run, rank=self._rank, label=label, step=step, total=total, at_s=at_s))
            if self._waiting:
                self._start_timer(SEND_EVERY_S)
        finally:
            self._is_sending = False

    def _send_report(self, report: _Report) -> None:
        if values := report.numbers():
            self._send(
                m.Measured(run=self._run, rank=self._rank, step=report.step, values=values, at_s=report.at_s),
            )

    def _soon(self) -> None:
        """Send now or shortly, without waiting for another thread, since finalizers run at any time."""
        if self._timer is not None:
            return
        wait_s = self._sent_at_s + SEND_EVERY_S - time.monotonic()
        if wait_s <= 0 and self._sending.acquire(blocking=False):
            try:
                return self._send_all()
            finally:
                self._sending.release()
        self._start_timer(max(0.0, wait_s))

    def _start_timer(self, wait_s: float) -> None:
        self._timer = threading.Timer(wait_s, self.flush)
        self._timer.daemon = True
        self._timer.start()


def run_id() -> str | None:
    """Return the id of the run that this rank executes a cell of."""
    return None if identity.cell.reporter is None else identity.cell.reporter.run


def report(values: Mapping[str, object] | None = None, *, step: int | None = None, **metrics: object) -> None:
    """Show numbers of this rank in the notebook: `report(loss=loss, accuracy=0.9)`.

    Args:
        values: The same as a mapping, for names that are not identifiers.
        step: The step of the training; by default it counts up from 0.
        metrics: Numbers, or anything `float()` takes, such as a tensor with one element.

    Does nothing outside a distributed run. Raises a `TypeError` that names a value which is not a number.
    """
    if (reporter := identity.cell.reporter) is None:
        return
    reporter.measured({name: _number(name, value) for name, value in {**(values or {}), **metrics}.items()}, step)


def _number(name: str, value: object) -> float | HostCopy:
    try:
        if is_on_device(value):
            return _sent(value)
        # Without its gradient: torch warns of a conversion with it.
        return float(value.detach() if _is_tensor(value) else value)  # type: ignore[arg-type, attr-defined]
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"report({name}=...) takes a number, not {type(value).__name__}.") from error


def is_on_device(value: object) -> bool:
    """Return whether the value is a tensor in the memory of an accelerator."""
    return _is_tensor(value) and value.device.type not in ("cpu", "meta")  # type: ignore[attr-defined]


def _is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _sent(tensor: object) -> HostCopy:
    from jupyter_distrib.worker.host_copy import HostCopy

    if tensor.numel() != 1:  # type: ignore[attr-defined]
        raise ValueError("more than one number")
    return HostCopy(tensor)  # type: ignore[arg-type]


def progress(iterable: Iterable[T], *, total: int | None = None, label: str = "") -> Iterator[T]:
    """Iterate, and show the progress of this rank in the notebook; outside a run, only iterate.

    Args:
        iterable: The items.
        total: The number of items, if `len(iterable)` does not give it.
        label: A word before the bar.
    """
    if total is None:
        try:
            total = len(iterable)  # type: ignore[arg-type]
        except TypeError:
            total = None
    step = 0
    for step, item in enumerate(iterable):
        if identity.cell.reporter is not None:
            identity.cell.reporter.progressed(label, step, total)
        yield item
        step += 1
    if identity.cell.reporter is not None:
        identity.cell.reporter.progressed(label, step, total)
