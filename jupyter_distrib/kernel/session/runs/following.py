"""The output of one run, and output and events as iterators, which end with the run: `run.logs()`,
`run.logs(follow=True)`, `run.events()`.

Output is read from the logs, which have all of it, and what the ranks report comes as events; both begin with what
there is already. In the thread that iterates; the feed is filled in the node's thread.
"""

from __future__ import annotations

import codecs
import queue
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, Protocol

from jupyter_distrib.errors import PoolError
from jupyter_distrib.kernel.record.observer import Observer
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.kernel.session.runs import json_lines
from jupyter_distrib.system import formatting, interrupts, log_folder, paths, record_file
from jupyter_distrib.wire import messages as m

READ_BYTES = 1 << 20
Event = dict[str, Any]


class FollowedRun(json_lines.ReportedRun, Protocol):
    """The part of a run that is needed to follow it."""

    def done(self) -> bool: ...
    def feeding(self) -> AbstractContextManager[Feed]: ...


class LogTail:
    """A reader of the lines that have been added to a log since the last look.

    Args:
        path: Returns the path of the log; raises `PoolError` if the logs of the run were removed.
    """

    def __init__(self, path: Callable[[], Path]) -> None:
        self._path = path
        self._position = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._rest = ""

    def lines(self, *, final: bool = False) -> Iterator[str]:
        """Yield the new lines, without their ends; at the end of the run also the unfinished last line."""
        while data := self._read():
            *complete, self._rest = (self._rest + self._decoder.decode(data)).split("\n")
            yield from complete
        if final and (last := self._rest + self._decoder.decode(b"", True)):
            self._rest = ""
            yield last

    def _read(self) -> bytes:
        with suppress(OSError, PoolError), record_file.opened(self._path()) as file:
            size = file.seek(0, 2)
            self._position = min(self._position, size)  # a log that has reached its limit is written anew at its end
            file.seek(self._position)
            data = file.read(READ_BYTES)
            self._position += len(data)
            return data
        return b""


class Feed(Observer):
    """A queue of the past and coming events of a run that are not in its logs.

    Args:
        record: The record of the run, whose lock is held.
    """

    def __init__(self, record: RunRecord) -> None:
        self._queue: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        for event in _so_far(record):
            self._queue.put(event)

    def observe(self, event: m.RunEvent, record: RunRecord) -> None:
        self._queue.put(_to_message(event))

    def wait(self, timeout_s: float) -> Iterator[Event]:
        """Yield the events that have come; wait for one until this time."""
        with suppress(queue.Empty):
            event = interrupts.get(self._queue, timeout_s)
            while True:
                if event is not None:
                    yield event
                event = self._queue.get_nowait()


def log_file(run: FollowedRun, rank: int) -> Path:
    """Return the path of a rank's log. Raises `PoolError` if the run has no such rank, or its logs were removed."""
    _check_rank(run, rank)
    folder = Path(run.record.log_directory or paths.log_directory() / run.id)
    log_folder.check(folder)
    return folder / f"rank{rank}.log"


def text(run: FollowedRun, rank: int | None) -> str:
    """Return the output of a rank so far, or of all ranks, one after another. Raises the same as `log_file`."""
    texts = []
    for number in sorted(run.record.ranks) if rank is None else [rank]:
        path = log_file(run, number)
        with suppress(OSError), record_file.opened(path) as file:
            found = file.read().decode("utf-8", "backslashreplace")
            texts.append(f"--- rank {number}\n{found}" if rank is None and found else found)
    return "".join(texts)


def _check_rank(run: FollowedRun, rank: int) -> None:
    ranks = run.record.ranks
    if ranks and rank not in ranks:
        is_on = "was on" if run.done() else "is on"
        raise PoolError(f"run {run.id} has no rank {rank!r}: it {is_on} {formatting.rank_list(ranks)}.")


def lines(run: FollowedRun, rank: int | None) -> Iterator[str]:
    """Return an iterator over each line that a rank writes, or that any rank writes, as `[1] text`; it ends with the
    run. Raises `PoolError` at once if the run has no such rank."""
    if rank is not None:
        _check_rank(run, rank)
    return _lines(run, rank)


def _lines(run: FollowedRun, rank: int | None) -> Iterator[str]:
    with run.feeding() as feed:
        for event in _events(run, feed, rank):
            if event["event"] == "output":
                yield event["text"] if rank is not None else f"[{event['rank']}] {event['text']}"


def events(run: FollowedRun) -> Iterator[Event]:
    """Yield the past and coming events of a run, each as JSON values; return after its end."""
    with run.feeding() as feed:
        for event in _events(run, feed, None):
            yield {"run": run.id, "elapsed_s": round(run.elapsed_s, 3), **event}
    yield {**json_lines.status_of(run), "event": "ended"}


def _events(run: FollowedRun, feed: Feed, only: int | None) -> Iterator[Event]:
    tails: dict[int, LogTail] = {}
    state = ""
    ended = False
    while not ended:
        ended = run.done()  # what comes after this look is read in the next turn, or was there before the end
        if not ended and run.state != state:
            state = run.state
            yield {"event": "state", "state": state, "place": run.place}
        reported = list(feed.wait(0.0 if ended else interrupts.HEAR_S))
        for number in [each for each in list(run.record.ranks) if only in (None, each)]:
            tail = tails.setdefault(number, LogTail(lambda number=number: log_file(run, number)))  # type: ignore[misc]
            for line in tail.lines(final=ended):
                yield {"event": "output", "rank": number, "text": line}
        yield from reported


def _so_far(record: RunRecord) -> Iterator[Event]:
    """Yield what is known of a run that has begun, apart from its output."""
    for rank in record.ranks.values():
        for sample in rank.history:
            yield _metrics(rank.rank, sample.step, sample.values)
        if rank.finished and not record.ended:
            yield {"event": "rank", "rank": rank.rank, "state": rank.state}
    for note in record.notes:
        yield {"event": "note", "rank": note.rank, "text": note.text}


def _to_message(event: m.RunEvent) -> Event | None:
    match event:
        case m.Measured():
            return _metrics(event.rank, event.step, event.values)
        case m.Progressed():
            fields = {"rank": event.rank, "label": event.label, "step": event.step, "total": event.total}
            return {"event": "progress", **fields}
        case m.Noted():
            return {"event": "note", "rank": event.rank, "text": event.text}
        case m.Stalled():
            return {"event": "stall", "text": event.text}
        case m.Moved():
            return {"event": "stall", "text": ""}
        case m.Restarted():
            fields = {"attempt": event.attempt, "max_restarts": event.max_restarts, "cause": event.cause}
            return {"event": "restart", **fields, **({"ranks": len(event.ranks)} if event.ranks else {})}
        case m.Started():
            return {"event": "rank", "rank": event.rank, "state": "running"}
        case m.Returned():
            return {"event": "rank", "rank": event.rank, "state": "done"}
        case m.Failed():
            error = {"type": event.failure.type_name, "message": event.failure.message}
            return {"event": "rank", "rank": event.rank, "state": "failed", **error}
        case m.Interrupted():
            return {"event": "rank", "rank": event.rank, "state": "interrupted"}
        case m.Exited():
            return {"event": "rank", "rank": event.rank, "state": "interrupted" if event.asked else "lost"}
        case _:
            return None


def _metrics(rank: int, step: int, values: dict[str, float]) -> Event:
    numbers = {name: json_lines.number(value) for name, value in values.items()}
    return {"event": "metrics", "rank": rank, "step": step, "values": numbers}
