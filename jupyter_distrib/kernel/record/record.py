"""The record of one run: the fold of its events. Kernel side; no thread, no clock, standard library only.

Only `RunRecord.apply(event)` changes a record. The live view, the returned values, a saved record and a reattached run
are all readings of the same fold. Memory is bounded for any amount of output, because the full text is in the log
files.

    Wrote --> Stream (one per rank and stream) --+--> complete lines --> RunRecord.lines_since
              joins pieces, folds \\r and codes    +--> tqdm's bars   --> RankRecord.progress
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import isfinite
from typing import cast

from jupyter_distrib.kernel.record import nested_progress
from jupyter_distrib.kernel.record.displays import RankClearing
from jupyter_distrib.kernel.record.native_frames import NativeFrames
from jupyter_distrib.kernel.record.not_finite import noted
from jupyter_distrib.kernel.record.output_lines import Line, Lines, line_of
from jupyter_distrib.kernel.record.rank_record import OfOneRank, RankRecord, Sample
from jupyter_distrib.kernel.record.terminal_stream import Stream
from jupyter_distrib.system.formatting import short
from jupyter_distrib.wire import messages as m

HISTORY = 1000
NOTES = 100
NOT_FINITE = 5
"""Number of values to name when they become nan or infinite."""


class RunRecord:
    """The state of a run.

    Args:
        workers: The facts about the ranks before the first event: pid, device, and whether they are still starting.
        remark: A sentence to show if anything is shown; a `Noted` is always shown.
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
        workers: Iterable[m.WorkerInfo] = (),
        remark: str = "",
    ) -> None:
        self.run = run
        self.label = label
        self.world_size = world_size
        self.gpus = gpus
        self.strategy = strategy
        self.remark = remark
        self.ranks: dict[int, RankRecord] = {rank: RankRecord(rank=rank) for rank in sorted(ranks)}
        self.notes: list[m.Noted] = []
        self.not_finite: dict[str, list[int]] = {}
        """A sentence for each of the first reported values that became nan or infinite, with its ranks."""
        self.ended = False
        self.limit_s: float | None = None
        """The time limit that ended the run; None if none did."""
        self.hung = False
        """Whether the limit was one for a stall (`--hang-timeout`)."""
        self.hopeless = False
        """Whether it was the limit for waiting for a rank that had left the cell, which cannot end."""
        self.log_directory = ""
        self.stall: m.Stalled | None = None
        """The current stall, or the one in which an ended run was stopped."""
        self.restarts: list[m.Restarted] = []
        """The restarts of the run, after the loss of a rank or with more ranks, each with its cause."""
        self._first_began_at_s: float | None = None
        """The start of the first attempt, if there is a second one."""
        self.changes = 0
        """Number of events so far; a view redraws when it has changed."""
        self._output = Lines()
        self._clearing: dict[int, RankClearing] = {}
        self._frames: dict[int, NativeFrames] = {}
        self._last_at_s: float | None = None
        for worker in workers:
            if rank := self.ranks.get(worker.rank):
                rank.pid, rank.device, rank.device_name = worker.pid, worker.device, worker.device_name
                rank.state = "starting" if worker.state == "starting" else "waiting"

    def apply(self, event: m.RunEvent) -> None:
        """Apply one event of this run.

        Raises:
            ValueError: The event belongs to another run.
        """
        if event.run != self.run:
            raise ValueError(f"an event of run {event.run} came to the record of run {self.run}")
        self.changes += 1
        match event:
            case m.Wrote():
                self._write(self.ranks[event.rank], event)
            case m.Measured():
                self._measure(self.ranks[event.rank], event)
            case m.Noted():
                self.notes = [*self.notes, event][-NOTES:]
            case m.Displayed():
                self._display(self.ranks[event.rank], event)
            case m.Cleared():
                rank = self.ranks[event.rank]
                rank.displays = self._of(rank.rank).after_call(event, rank.displays)
            case m.Stalled() | m.Moved():
                self.stall = event if isinstance(event, m.Stalled) else None
            case m.Profiled() | m.Saving() | m.Saved():
                pass  # `kernel/session/runs/trace_writer.py` and `server/detached_runs.py` take what they say
            case m.TimedOut():
                self.limit_s, self.hung, self.hopeless = event.limit_s, event.stalled, event.left
            case m.Restarted() | m.RanksReduced():
                self._begin_again(event)
            case m.Ended():
                self._end(event)
            case _:
                of_rank = cast("OfOneRank", event)
                self.ranks[of_rank.rank].apply(of_rank)
        if not isinstance(event, m.Noted) and event.at_s:
            self._last_at_s = max(event.at_s, self._last_at_s or event.at_s)

    @property
    def ok(self) -> bool:
        """Return whether every rank reached the end of the cell, or left it with `sys.exit(0)`."""
        return all(rank.state == "done" for rank in self.ranks.values())

    @property
    def in_debugger(self) -> tuple[int, ...]:
        """Return the ranks that are stopped in the debugger."""
        return tuple(number for number, rank in self.ranks.items() if rank.prompt is not None)

    @property
    def began_at_s(self) -> float | None:
        """Return the start of the first rank in the first attempt; None until one has started."""
        if self.restarts:
            return self._first_began_at_s
        return min([rank.started_at_s for rank in self.ranks.values() if rank.started_at_s is not None], default=None)

    @property
    def elapsed_s(self) -> float:
        """Return the time from the first rank's start to the last event; a running view adds its own clock."""
        began_at_s, last_at_s = self.began_at_s, self._last_at_s
        return 0.0 if began_at_s is None or last_at_s is None else max(0.0, last_at_s - began_at_s)

    @property
    def peak_rss_bytes(self) -> int:
        """Return the sum of the ranks' peaks, each at its own time; 0 while unknown."""
        return sum([rank.peak_rss_bytes for rank in self.ranks.values()])

    @property
    def peak_gpu_memory_bytes(self) -> int | None:
        """Return the sum of the ranks' peaks on their GPUs; None without GPUs."""
        peaks = [rank.peak_gpu_memory_bytes for rank in self.ranks.values() if rank.peak_gpu_memory_bytes is not None]
        return sum(peaks) if peaks else None

    @property
    def peak_tensor_bytes(self) -> int | None:
        """Return the largest peak of tensors on one GPU; None if unknown."""
        return max([rank.peak_tensor_bytes or 0 for rank in self.ranks.values()], default=0) or None

    @property
    def line_count(self) -> int:
        """Return the number of complete lines that the ranks wrote, including lines that the record no longer keeps."""
        return self._output.count

    @property
    def entry_count(self) -> int:
        """Return the entry number to pass to `lines_since` later, to get only the lines that arrive from now on."""
        return self._output.entries

    def lines_since(self, entry: int = 0) -> list[Line]:
        """Return complete lines of all ranks in order of arrival, with one gap in place of lines that are not kept."""
        return self._output.since(entry)

    def partial_lines(self) -> list[Line]:
        """Return the unfinished last line of each rank."""
        return [line_of(rank, name, text) for rank, name, stream in self._streams() if (text := stream.peek())]

    def _write(self, rank: RankRecord, event: m.Wrote) -> None:
        stream = self._of(event.rank).stream(event.stream)
        if event.skipped_lines:
            self._keep(rank, event.stream, stream.finish())
            self._output.append(Line(rank=event.rank, stream=event.stream, skipped=event.skipped_lines))
        fed = stream.feed(event.text)
        if fed.cleared:
            rank.displays, rank.last_line = self._of(event.rank).after_output(event.stream, fed, rank.displays), ""
        self._keep(rank, event.stream, fed.lines)
        for depth, bar in fed.bars:
            rank.progress = nested_progress.drawn(rank.progress, depth, bar)
        rank.last_line = stream.peek() or rank.last_line

    def _keep(self, rank: RankRecord, stream: str, texts: list[str]) -> None:
        if stream == "stderr":
            texts = self._frames.setdefault(rank.rank, NativeFrames()).without(texts)
        self._output.extend(rank.rank, stream, texts)
        rank.last_line = next((text for text in reversed(texts) if text.strip()), rank.last_line)

    def _display(self, rank: RankRecord, event: m.Displayed) -> None:
        if not event.update:
            rank.displays = self._of(event.rank).after_display(rank.displays)
        rank.displays = rank.displays.after(event)

    def _measure(self, rank: RankRecord, event: m.Measured) -> None:
        for name, value in event.values.items():
            if not isfinite(value) and isfinite(rank.metrics.get(name, 0.0)):
                self._note_not_finite(rank.rank, f"{short(name)} is {value} at step {event.step}")
            if (now := noted(rank.not_finite.get(name), event.step, value)) is not None:
                rank.not_finite = {**rank.not_finite, name: now}
        if self.restarts and not event.values.keys() <= rank.metrics.keys():
            restarted_s = self.restarts[-1].at_s
            rank.history = [
                replace(old, lost=True) if old.at_s <= restarted_s and _again(old, event) else old
                for old in rank.history
            ]
        rank.metrics = {**rank.metrics, **event.values}
        rank.metrics_step = event.step
        rank.history.append(Sample(step=event.step, values=event.values, at_s=event.at_s))
        if len(rank.history) > HISTORY:
            del rank.history[-2::-2]

    def _note_not_finite(self, rank: int, text: str) -> None:
        if text in self.not_finite or len(self.not_finite) < NOT_FINITE:
            self.not_finite = {**self.not_finite, text: [*self.not_finite.get(text, ()), rank]}

    def _begin_again(self, event: m.Restarted | m.RanksReduced) -> None:
        self._restart(event) if isinstance(event, m.Restarted) else self._reduce(event)

    def _restart(self, event: m.Restarted) -> None:
        """Begin the next attempt: reset each rank, but keep its output and reports."""
        self._finish_lines()
        self._clearing.clear()
        self._first_began_at_s = self.began_at_s
        self.restarts.append(event)
        self.stall = None
        for number, old in self.ranks.items():
            self.ranks[number] = RankRecord(
                rank=number,
                state="starting",
                device=old.device,
                device_name=old.device_name,
                history=old.history,
                displays=old.displays,
                last_line=old.last_line,
                peak_rss_bytes=old.peak_rss_bytes,
                peak_gpu_memory_bytes=old.peak_gpu_memory_bytes,
            )
        if event.ranks:
            self._grow(event)
        else:
            self._note(f"attempt {event.attempt + 1} of {event.max_restarts + 1}, since {event.cause}")

    def _reduce(self, event: m.RanksReduced) -> None:
        """Continue with the remaining ranks."""
        had, self.world_size = self.world_size, len(event.ranks)
        self.ranks = {number: rank for number, rank in self.ranks.items() if number in event.ranks}
        self._note(
            f"goes on with {self.world_size} of {had} ranks{_on(event.nodes)}: {event.cause.rstrip('.')}. "
            f"{self._global_batch(had)}"
        )

    def _grow(self, event: m.Restarted) -> None:
        """Continue with more ranks."""
        had, self.world_size = self.world_size, len(event.ranks)
        self.ranks |= {
            number: RankRecord(rank=number, state="starting") for number in event.ranks if number not in self.ranks
        }
        self._note(
            f"grown from {had} to {self.world_size} ranks{_on(event.nodes)} {event.cause}. {self._global_batch(had)}"
        )

    def _global_batch(self, had: int) -> str:
        return f"With the same batch size on each rank, the global batch is {self.world_size}/{had} of what it was"

    def _note(self, text: str) -> None:
        self.notes = [*self.notes, m.Noted(run=self.run, rank=None, text=text)][-NOTES:]

    def _finish_lines(self) -> None:
        for rank, name, stream in self._streams():
            self._keep(self.ranks[rank], name, stream.finish())

    def _of(self, rank: int) -> RankClearing:
        if rank not in self._clearing:
            self._clearing[rank] = RankClearing(rank, self._output)
        return self._clearing[rank]

    def _streams(self) -> list[tuple[int, str, Stream]]:
        return [(rank, *each) for rank, of_rank in sorted(self._clearing.items()) for each in of_rank.streams.items()]

    def _end(self, event: m.Ended) -> None:
        self._finish_lines()
        self.ended, self.log_directory = True, event.log_directory
        if self.ok:
            self.stall = None


def _on(nodes: int) -> str:
    return f" on {nodes} node{'s' * (nodes != 1)}" if nodes else ""


def _again(old: Sample, event: m.Measured) -> bool:
    """Return whether the first report of an attempt shows that an earlier one's step is computed again."""
    return old.step >= event.step and not old.values.keys().isdisjoint(event.values)
