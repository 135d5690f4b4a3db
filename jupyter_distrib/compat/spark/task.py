"""Runs one rank of a Spark distributor: calls the user's function, and sends its output, reports and exceptions to
the notebook.

Called in a process that torchrun has started in a Spark task, or on the driver's machine."""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from jupyter_distrib.compat.spark import lines
from jupyter_distrib.interfaces import identity
from jupyter_distrib.wire import messages as m
from jupyter_distrib.worker import failure
from jupyter_distrib.worker.output import reporting

READ_BYTES = 1 << 16
LEFT_S = 1.0
"""Seconds to wait at the end for output of other processes of the rank."""


def execute(
    run: str, token: str, function: Callable[..., Any], args: Sequence[Any], keywords: Mapping[str, Any]
) -> Any:
    """Call the function, report to the notebook, and return its value."""
    sender = EventSender(run, token, int(os.environ["RANK"]))
    sender.send(m.Started(run=run, rank=sender.rank, pid=os.getpid(), device=_device(), at_s=time.monotonic()))
    identity.cell = identity.CellState(reporter=(reporter := reporting.Reporter(run, sender.rank, sender.send)))
    error: BaseException | None = None
    value = None
    with sender.streams():
        try:
            value = function(*args, **keywords)
        except BaseException as raised:  # noqa: BLE001 - foreign code; raised again below
            error = raised
        identity.cell = identity.CellState()
        reporter.close()
    left = isinstance(error, SystemExit) and error.code in (None, 0)
    sender.send(_end(run, sender.rank, None if left else error))
    if error is not None and not left:
        os._exit(1)  # the notebook has the traceback, and exit handlers of frameworks may wait for other ranks
    return value


def _device() -> str:
    return "cuda" if os.environ.get("CUDA_VISIBLE_DEVICES") else "cpu"


def _end(run: str, rank: int, error: BaseException | None) -> m.RunEvent:
    at_s = time.monotonic()
    if error is None:
        return m.Returned(run=run, rank=rank, value=None, at_s=at_s)
    if failure.interrupt_in(error) is not None:
        return m.Interrupted(run=run, rank=rank, frames=failure.frames_when_stopped(error), at_s=at_s)
    described = failure.describe(error, run=run, by_value=True, groupless="")
    with suppress(Exception):  # an exception that cannot be pickled is only described
        # By the same pickler with which the function came, so that a class of the notebook is the notebook's own.
        from pyspark import cloudpickle

        described = replace(described, parcel=m.Parcel(data=cloudpickle.dumps(error)))
    return m.Failed(run=run, rank=rank, failure=described, at_s=at_s)


class EventSender:
    """Sends events to the notebook, through the original standard output of this process."""

    def __init__(self, run: str, token: str, rank: int) -> None:
        self.rank = rank
        self._run, self._token = run, token
        self._out = os.dup(1)
        self._lock = threading.Lock()
        threading.Thread(target=self._watch, name="jupyter_distrib-watch", daemon=True).start()

    def send(self, event: m.RunEvent) -> None:
        self._write(lines.of_event(self._token, self.rank, event))

    def _write(self, found: Iterator[str]) -> None:
        with self._lock:
            for line in found:
                os.write(self._out, line.encode("utf-8", "backslashreplace"))

    def _watch(self) -> None:
        """Exit when nobody reads the output any more, because Spark has killed the task."""
        poll = select.poll()
        poll.register(self._out, 0)
        poll.poll()
        os._exit(1)

    @contextmanager
    def streams(self) -> Iterator[None]:
        """Send everything written to standard output and error inside the block, also by C code and child processes."""
        kept, threads = (os.dup(1), os.dup(2)), []
        for number, stream in ((1, "stdout"), (2, "stderr")):
            reading, writing = os.pipe()
            os.dup2(writing, number)
            os.close(writing)
            threads.append(threading.Thread(target=self._pass_on, args=(reading, stream), daemon=True))
            threads[-1].start()
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        try:
            yield
        finally:
            for stream_ in (sys.stdout, sys.stderr):
                with suppress(Exception):  # the function may have closed it
                    stream_.flush()
            for number, descriptor in zip((1, 2), kept, strict=True):
                os.dup2(descriptor, number)
            for thread in threads:
                thread.join(LEFT_S)

    def _pass_on(self, reading: int, stream: str) -> None:
        import codecs

        decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        while data := os.read(reading, READ_BYTES):
            self._write(lines.of_text(self._token, self.rank, stream, decoder.decode(data)))
