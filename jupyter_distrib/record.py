"""What is known about one run: the fold of its events. Kernel side; no thread, no clock, standard library only.

`RunRecord.apply(event)` is the only way anything changes here. The live view, the returned values, a saved record and
a reattached run are all readings of the same fold. Memory is bounded whatever the ranks print, because the full text is
in the log files.

    Wrote --> Stream (one per rank and stream) --+--> complete lines --> RunRecord.lines_since
              joins pieces, folds \\r and codes    +--> tqdm's bars   --> RankRecord.progress
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, assert_never

from jupyter_distrib.events import (
    Ended,
    Exited,
    Failed,
    Failure,
    Frame,
    Interrupted,
    Measured,
    Noted,
    Parcel,
    Progressed,
    Returned,
    RunEvent,
    Started,
    TimedOut,
    WorkerInfo,
    Wrote,
)
from jupyter_distrib.streams import Progress, Stream

RankState = Literal["waiting", "starting", "running", "done", "failed", "lost", "interrupted"]

HEAD_LINES = 200
TAIL_LINES = 1000
HISTORY = 1000
NESTED_BARS = 3
NOTES = 100


# ---------------------------------------------------------------------------------------------------- what is kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of output, or (`skipped` > 0, no text) the place where that many lines were left out."""

    rank: int | None
    """None: the lines left out there are of any rank."""
    stream: str = "stdout"
    text: str = ""
    skipped: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Numbers that a rank reported together."""

    step: int
    values: dict[str, float]
    at_s: float


@dataclass(slots=True, kw_only=True)
class RankRecord:
    """One rank of a run. Read it; only `RunRecord.apply` writes it."""

    rank: int
    state: RankState = "waiting"
    pid: int = 0
    device: str = ""
    device_name: str = ""
    progress: tuple[Progress, ...] = ()
    """Nested loops, outermost first; empty if the rank reports none."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The last value of every name ever reported."""
    metrics_step: int = 0
    history: list[Sample] = field(default_factory=list)
    """Thinned to every second sample whenever it is full, so that it always spans the whole run."""
    last_line: str = ""
    failure: Failure | None = None
    failed_at_s: float = 0.0
    exit: Exited | None = None
    stopped_at: tuple[Frame, ...] = ()
    """Where an interrupt met it, outermost first."""
    returned: bool = False
    value: Parcel | None = None
    kept: dict[str, str] = field(default_factory=dict)
    """Names that stay on the rank -> name of the value's type."""
    exited_early: bool = False
    started_at_s: float | None = None
    ended_at_s: float | None = None

    @property
    def finished(self) -> bool:
        return self.state in ("done", "failed", "lost", "interrupted")

    @property
    def gone(self) -> bool:
        """Its process ended during the run, for whatever reason: what was kept on it is gone with it."""
        return self.exit is not None


# ---------------------------------------------------------------------------------------------------- the fold


class RunRecord:
    """The state of a run.

    Args:
        workers: What is known of the ranks before the first event: pid, device, and whether they are still starting.
        remark: A sentence to be shown if anything is; a `Noted` is shown in any case.
    """

    def __init__(
        self,
        *,
        run: str,
        label: str,
        ranks: Sequence[int],
        world_size: int,
        gpus: bool = False,
        strategy: str = "none",
        workers: Iterable[WorkerInfo] = (),
        remark: str = "",
    ) -> None:
        self.run = run
        self.label = label
        self.world_size = world_size
        self.gpus = gpus
        self.strategy = strategy
        self.remark = remark
        self.ranks: dict[int, RankRecord] = {rank: RankRecord(rank=rank) for rank in sorted(ranks)}
        self.notes: list[Noted] = []
        self.ended = False
        self.limit_s: float | None = None
        """The time limit that ended the run; None if none did."""
        self.log_directory = ""
        self.changes = 0
        """Grows with every event, so that a view knows whether to draw."""
        self._streams: dict[tuple[int, str], Stream] = {}
        self._output = _Output()
        self._last_at_s: float | None = None
        for worker in workers:
            if rank := self.ranks.get(worker.rank):
                rank.pid, rank.device, rank.device_name = worker.pid, worker.device, worker.device_name
                rank.state = "starting" if worker.state == "starting" else "waiting"

    def apply(self, event: RunEvent) -> None:
        """Take one event of this run.

        Raises:
            ValueError: It belongs to another run.
        """
        if event.run != self.run:
            raise ValueError(f"an event of run {event.run} came to the record of run {self.run}")
        self.changes += 1
        match event:
            case Started():
                self._start(self.ranks[event.rank], event)
            case Wrote():
                self._write(self.ranks[event.rank], event)
            case Progressed():
                self._progress(self.ranks[event.rank], event)
            case Measured():
                self._measure(self.ranks[event.rank], event)
            case Noted():
                self.notes = [*self.notes, event][-NOTES:]
            case Returned():
                self._return(self.ranks[event.rank], event)
            case Failed():
                self._fail(self.ranks[event.rank], event)
            case Interrupted():
                self._interrupt(self.ranks[event.rank], event)
            case Exited():
                self._exit(self.ranks[event.rank], event)
            case TimedOut():
                self.limit_s = event.limit_s
            case Ended():
                self._end(event)
            case _:
                assert_never(event)
        if not isinstance(event, Noted) and event.at_s:
            self._last_at_s = max(event.at_s, self._last_at_s or event.at_s)

    @property
    def ok(self) -> bool:
        """Every rank reached the end of the cell, or left it with `sys.exit(0)`."""
        return all(rank.state == "done" for rank in self.ranks.values())

    @property
    def elapsed_s(self) -> float:
        """From the first rank's start to the last event; a running view adds its own clock."""
        starts = [rank.started_at_s for rank in self.ranks.values() if rank.started_at_s is not None]
        return max(0.0, self._last_at_s - min(starts)) if starts and self._last_at_s is not None else 0.0

    @property
    def line_count(self) -> int:
        """Complete lines that the ranks wrote, also those that are not kept here."""
        return self._output.lines

    @property
    def entry_count(self) -> int:
        """What to give to `lines_since` to get only what comes after now."""
        return self._output.entries

    def lines_since(self, entry: int = 0) -> list[Line]:
        """Complete lines of all ranks in order of arrival, with one gap where the middle is no longer kept."""
        return self._output.since(entry)

    def partial_lines(self) -> list[Line]:
        """What each rank has written of a line that has not ended yet."""
        return [
            Line(rank=rank, stream=name, text=text)
            for (rank, name), stream in sorted(self._streams.items())
            if (text := stream.peek())
        ]

    def to_state(self, *, lines: int = 200) -> dict[str, Any]:
        """Everything a view needs, as JSON can carry it; of the output the last `lines` entries.

        Times are seconds since the first rank's start; numbers that JSON does not know are `"nan"`, `"inf"`, `"-inf"`.
        """
        starts = [rank.started_at_s for rank in self.ranks.values() if rank.started_at_s is not None]
        origin_s = min(starts, default=0.0)
        return {
            "run": self.run,
            "label": self.label,
            "world_size": self.world_size,
            "gpus": self.gpus,
            "strategy": self.strategy,
            "remark": self.remark,
            "ended": self.ended,
            "limit_s": self.limit_s,
            "ok": self.ended and self.ok,
            "elapsed_s": self.elapsed_s,
            "log_directory": self.log_directory,
            "line_count": self.line_count,
            "notes": [{"rank": note.rank, "text": note.text} for note in self.notes],
            "ranks": [_rank_state(rank, origin_s) for rank in self.ranks.values()],
            "lines": [
                {"rank": line.rank, "stream": line.stream, "text": line.text, "skipped": line.skipped}
                for line in (self.lines_since()[-lines:] if lines else [])
            ],
        }

    def _start(self, rank: RankRecord, event: Started) -> None:
        rank.state, rank.pid, rank.device, rank.started_at_s = "running", event.pid, event.device, event.at_s

    def _write(self, rank: RankRecord, event: Wrote) -> None:
        stream = self._streams.setdefault((event.rank, event.stream), Stream())
        if event.skipped_lines:
            self._keep(rank, event.stream, stream.finish())
            self._output.append(Line(rank=event.rank, stream=event.stream, skipped=event.skipped_lines))
        texts, bars = stream.feed(event.text)
        self._keep(rank, event.stream, texts)
        for depth, bar in bars:
            rank.progress = _drawn(rank.progress, depth, bar)
        rank.last_line = stream.peek() or rank.last_line

    def _keep(self, rank: RankRecord, stream: str, texts: list[str]) -> None:
        number, append = rank.rank, self._output.append
        for text in texts:
            append(Line(rank=number, stream=stream, text=text))
        rank.last_line = next((text for text in reversed(texts) if text.strip()), rank.last_line)

    def _progress(self, rank: RankRecord, event: Progressed) -> None:
        index = next((i for i, old in enumerate(rank.progress) if old.label == event.label), None)
        if index is None:
            outer, rate = tuple(old for old in rank.progress if not old.finished), None
        else:
            # An outer loop moves on only when the loops inside it are over, so those go.
            outer, rate = rank.progress[:index], _smoothed_rate(rank.progress[index], event)
        new = Progress(label=event.label, step=event.step, total=event.total, rate=rate, at_s=event.at_s)
        rank.progress = (*outer, new)[-NESTED_BARS:]

    def _measure(self, rank: RankRecord, event: Measured) -> None:
        rank.metrics = {**rank.metrics, **event.values}
        rank.metrics_step = event.step
        rank.history.append(Sample(step=event.step, values=event.values, at_s=event.at_s))
        if len(rank.history) > HISTORY:
            del rank.history[-2::-2]

    def _return(self, rank: RankRecord, event: Returned) -> None:
        rank.state, rank.returned, rank.ended_at_s = "done", True, event.at_s
        rank.value, rank.kept, rank.exited_early = event.value, event.kept, event.exited_early

    def _fail(self, rank: RankRecord, event: Failed) -> None:
        rank.state, rank.failure, rank.failed_at_s, rank.ended_at_s = "failed", event.failure, event.at_s, event.at_s

    def _interrupt(self, rank: RankRecord, event: Interrupted) -> None:
        rank.state, rank.stopped_at, rank.ended_at_s = "interrupted", event.frames, event.at_s

    def _exit(self, rank: RankRecord, event: Exited) -> None:
        rank.exit = event
        # A rank that had failed keeps that: it is the better answer to "why". What it kept is gone in any case.
        if rank.state != "failed" and not (rank.state == "done" and event.asked):
            rank.state, rank.ended_at_s = "lost", event.at_s

    def _end(self, event: Ended) -> None:
        for (rank, name), stream in self._streams.items():
            self._keep(self.ranks[rank], name, stream.finish())
        self.ended, self.log_directory = True, event.log_directory


def _smoothed_rate(old: Progress, event: Progressed) -> float | None:
    seconds, steps = event.at_s - old.at_s, event.step - old.step
    if steps < 0:  # the loop was begun again
        return None
    if seconds <= 0:
        return old.rate
    return steps / seconds if old.rate is None else 0.7 * old.rate + 0.3 * steps / seconds


def _drawn(bars: tuple[Progress, ...], depth: int | None, bar: Progress | None) -> tuple[Progress, ...]:
    """Put tqdm's bar at its depth and drop those below it; `bar` None clears, `depth` None means not known yet."""
    if depth is None:
        same = (i for i, old in enumerate(bars) if bar and (old.label, old.total) == (bar.label, bar.total))
        depth = next(same, 0)
    return (bars[:depth] + ((bar,) if bar else ()))[-NESTED_BARS:]


def _rank_state(rank: RankRecord, origin_s: float) -> dict[str, Any]:
    ended = rank.exit
    return {
        "rank": rank.rank,
        "state": rank.state,
        "pid": rank.pid,
        "device": rank.device,
        "device_name": rank.device_name,
        "progress": [
            {
                "label": bar.label,
                "step": bar.step,
                "total": bar.total,
                "rate": None if bar.rate is None else _number(bar.rate),
                "unit": bar.unit,
                "detail": bar.detail,
            }
            for bar in rank.progress
        ],
        "metrics": {name: _number(value) for name, value in rank.metrics.items()},
        "metrics_step": rank.metrics_step,
        "history": [
            {"step": sample.step, "values": {name: _number(value) for name, value in sample.values.items()}}
            for sample in rank.history
        ],
        "last_line": rank.last_line,
        "failure": rank.failure and {"type": rank.failure.type_name, "message": rank.failure.message},
        "exit": ended and {"code": ended.exit_code, "asked": ended.asked, "out_of_memory": ended.out_of_memory},
        "kept": dict(rank.kept),
        "exited_early": rank.exited_early,
        "started_s": None if rank.started_at_s is None else rank.started_at_s - origin_s,
        "ended_s": None if rank.ended_at_s is None else rank.ended_at_s - origin_s,
    }


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


class _Output:
    """The first and the last lines of all ranks together."""

    def __init__(self) -> None:
        self.entries = 0
        self.lines = 0
        self._head: list[Line] = []
        self._tail: deque[Line] = deque(maxlen=TAIL_LINES)
        self._dropped = 0

    def append(self, line: Line) -> None:
        self.entries += 1
        self.lines += line.skipped or 1
        if len(self._head) < HEAD_LINES:
            self._head.append(line)
            return
        if len(self._tail) == TAIL_LINES:
            self._dropped += self._tail[0].skipped or 1
        self._tail.append(line)

    def since(self, entry: int) -> list[Line]:
        start = self.entries - len(self._tail)
        gone = self._dropped if entry <= len(self._head) else start - entry
        gap = [Line(rank=None, skipped=gone)] if gone > 0 else []
        return [*self._head[entry:], *gap, *list(self._tail)[max(0, entry - start) :]]
