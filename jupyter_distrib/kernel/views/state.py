"""The state of a run as JSON can carry it: everything that a view in the browser shows of a run, as a whole and in
pieces, each under its own key, so that a browser gets only the pieces that have changed.

Kernel side, in the thread that shows the run; no clock. The golden state in `tests/` fixes the shape, for Python and
for JavaScript. Put together again (`assemble` in `static/state.js`) the pieces are the result of `state_of`, with
thinned histories:

    head            the run as a whole
    rank_3          one rank: state, progress, metrics, memory, last line, lines that are not finished
    history_3       its reported numbers, column by column, thinned to what a small chart can show
    course          how far ranks were behind over time
    display_3_0     its displays, one by one
    lines_7         output: a ring of `RING` chunks; only the newest of them grows

The pieces are bounded, whatever the ranks do: keys are used again, and a batch beyond `BATCH_LINES` has a gap.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from jupyter_distrib.kernel.analysis import failures
from jupyter_distrib.kernel.analysis.lost_peers import is_consequence
from jupyter_distrib.kernel.analysis.rank_mean import stride
from jupyter_distrib.kernel.analysis.shares import Shares
from jupyter_distrib.kernel.analysis.traceback_text import fingerprint, innermost, where
from jupyter_distrib.kernel.record.displays import KEPT, Display
from jupyter_distrib.kernel.record.output_lines import Line
from jupyter_distrib.kernel.record.rank_record import RankRecord, Sample
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.kernel.views import markup, shares, stacks, timeline
from jupyter_distrib.system.formatting import clipped
from jupyter_distrib.wire import messages as m

CHUNK = 50
RING = 24
BATCH_LINES = 100
LINE_CHARACTERS = 500
_LAST_LINE_CHARACTERS = 200
NAMES = 12
"""Number of a rank's metrics to send, with a count of the others; the record has all."""
FEWEST_CHARTS, MOST_CHARTS = 6, 24
"""Minimum and maximum number of charts of a rank: fewer with more ranks."""
POINTS = 12_000
"""Number of points of all charts and ranks together."""
FEWEST_POINTS = 30
"""Minimum number of points of a line."""
HISTORY_EVERY_S = 1.0
_COURSE_EVERY_S = 4.0
_DISPLAY_BYTES = 2_000_000
"""Maximum size of displays in one update; others wait for the next."""
_Piece = Any


def state_of(record: RunRecord, *, lines: int = 200) -> dict[str, Any]:
    """Return the state that a view needs, as JSON can carry it, with the last `lines` entries of the output.

    Times are seconds since the first rank's start; numbers that JSON does not know are `"nan"`, `"inf"`, `"-inf"`.
    """
    origin_s = origin(record)
    ranks = [
        {**row(rank, origin_s), "history": history(rank), "displays": displays(rank)} for rank in record.ranks.values()
    ]
    entries = record.lines_since()[-lines:] if lines else []
    return {**head(record), "ranks": ranks, "lines": [line_state(line) for line in entries]}


def origin(record: RunRecord) -> float:
    """Return the zero of the times in a state."""
    return record.began_at_s or 0.0


def head(record: RunRecord) -> dict[str, Any]:
    """Return the state of the run as a whole."""
    return {
        "run": record.run,
        "label": record.label,
        "world_size": record.world_size,
        "gpus": record.gpus,
        "strategy": record.strategy,
        "remark": record.remark,
        "ended": record.ended,
        "limit_s": record.limit_s,
        "hung": record.hung,
        "cause": failures.cause(record),
        "ok": record.ended and record.ok,
        "elapsed_s": record.elapsed_s,
        "log_directory": record.log_directory,
        "line_count": record.line_count,
        "peak_rss_bytes": record.peak_rss_bytes,
        "peak_gpu_memory_bytes": record.peak_gpu_memory_bytes,
        "stall": record.stall and _stall_state(record.stall),
        "notes": [
            *({"rank": note.rank, "text": note.text} for note in record.notes),
            *({"rank": rank, "text": text} for text, ranks in record.not_finite.items() for rank in ranks),
            *([{"rank": None, "text": sentence}] if (sentence := Shares.of(record).sentence) else []),
        ],
    } | shares.state(record)


def line_state(line: Line) -> dict[str, Any]:
    more: dict[str, Any] = {"spans": line.spans} if line.spans else {}
    if line.cleared:
        more["cleared"] = True
    return {"rank": line.rank, "stream": line.stream, "text": line.text, "skipped": line.skipped, **more}


def row(rank: RankRecord, origin_s: float) -> dict[str, Any]:
    """Return the state of one rank, without its history and its displays."""
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
                "rate": None if bar.rate is None else number(bar.rate),
                "unit": bar.unit,
                "detail": bar.detail,
            }
            for bar in rank.progress
        ],
        "metrics": {name: number(value) for name, value in rank.metrics.items()},
        "metrics_step": rank.metrics_step,
        "last_line": rank.last_line,
        "failure": rank.failure and _failure_state(rank.failure),
        "exit": ended
        and {
            "code": ended.exit_code,
            "asked": ended.asked,
            "reason": ended.reason,
            "out_of_memory": ended.out_of_memory,
        },
        "stack": rank.stack and _stack_state(rank.stack, origin_s),
        "kept": dict(rank.kept.types),
        "rss_bytes": rank.rss_bytes,
        "peak_rss_bytes": rank.peak_rss_bytes,
        "cpu_percent": rank.cpu_percent,
        "gpu_memory_bytes": rank.gpu_memory_bytes,
        "peak_gpu_memory_bytes": rank.peak_gpu_memory_bytes,
        "gpu_memory_total_bytes": rank.gpu_memory_total_bytes,
        "gpu_percent": rank.gpu_percent,
        "gpu_tensor_bytes": rank.gpu_tensor_bytes,
        "gpu_reserved_bytes": rank.gpu_reserved_bytes,
        "gpu_memory_of_all": rank.gpu_memory_of_all,
        "skipped_displays": rank.displays.skipped,
        "exited_early": rank.exited_early,
        "started_s": None if rank.started_at_s is None else rank.started_at_s - origin_s,
        "ended_s": None if rank.ended_at_s is None else rank.ended_at_s - origin_s,
    }


def history(rank: RankRecord) -> list[dict[str, Any]]:
    """Return the reported numbers, with a mark at steps that a later attempt has repeated."""
    return [
        {"step": sample.step, "values": {name: number(value) for name, value in sample.values.items()}}
        | ({"lost": True} if sample.lost else {})
        for sample in rank.history
    ]


def displays(rank: RankRecord) -> list[dict[str, Any]]:
    return [display_state(display) for display in rank.displays.shown]


def display_state(display: Display) -> dict[str, Any]:
    return {"data": markup.with_html(display.data), "metadata": display.metadata, "display_id": display.display_id}


def _failure_state(failure: m.Failure) -> dict[str, Any]:
    frame = innermost(failure.frames)
    return {
        "type": failure.type_name,
        "message": failure.message,
        "where": where(frame) if frame else "",
        "traceback": fingerprint(failure),
    }


def _stall_state(stall: m.Stalled) -> dict[str, Any]:
    places = [
        {"rank": place.rank, "where": place.where, "line": place.line, "waiting": place.waiting}
        for place in stall.places
    ]
    return {"text": stall.text, "places": places}


def _stack_state(stack: m.StackSeen, origin_s: float) -> dict[str, Any]:
    return {"lines": list(stacks.lines(stack.frames)), "trouble": stack.trouble, "seen_s": stack.at_s - origin_s}


def number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


class StateDelta:
    """The changes between the state that the browser has and the new one."""

    def __init__(self, pool: str) -> None:
        self.now: dict[str, _Piece] = {}
        """All pieces as they were last sent; replaced, never mutated, so that any thread may read them."""
        self._pool = pool
        self._entries = 0
        self._count = 0
        self._chunk: list[dict[str, Any]] = []
        self._histories: dict[int, tuple[Sample, float]] = {}
        """The newest sample sent of each rank, with the time of sending."""
        self._displays: dict[str, Display] = {}
        self._course_at_s = float("-inf")

    def changed(self, record: RunRecord, now_s: float, *, stopping: str = "") -> dict[str, _Piece]:
        """Return the pieces that differ from the pieces sent before."""
        of_run = {"elapsed_s": 0, "pool": self._pool, "stopping": stopping, "numbers": list(record.ranks)}
        pieces: dict[str, _Piece] = {"head": {**head(record), **of_run}}
        origin_s = origin(record)
        unfinished: dict[int | None, list[dict[str, Any]]] = {}
        for line in record.partial_lines():
            unfinished.setdefault(line.rank, []).append(_entry(line))
        for rank in record.ranks.values():
            pieces[f"rank_{rank.rank}"] = {**_row(record, rank, origin_s), "unfinished": unfinished.get(rank.rank, [])}
            pieces |= self._history(rank, now_s, len(record.ranks), origin_s)
        pieces |= self._course(record, now_s)
        pieces |= self._shown(record)
        pieces |= self._lines(record)
        new = {key: piece for key, piece in pieces.items() if key not in self.now or self.now[key] != piece}
        self.now = {**self.now, **new}
        return new

    def _history(self, rank: RankRecord, now_s: float, ranks: int, origin_s: float) -> dict[str, _Piece]:
        before, at_s = self._histories.get(rank.rank, (None, now_s - HISTORY_EVERY_S))
        if not rank.history or rank.history[-1] is before or now_s - at_s < HISTORY_EVERY_S:
            return {}
        self._histories[rank.rank] = rank.history[-1], now_s
        return {f"history_{rank.rank}": columns(rank, POINTS // ranks, origin_s)}

    def _course(self, record: RunRecord, now_s: float) -> dict[str, _Piece]:
        """Return the course of the run if it is due, since it is drawn over the whole run."""
        if len(record.ranks) < 2 or (now_s - self._course_at_s < _COURSE_EVERY_S and not record.ended):
            return {}
        self._course_at_s = now_s
        course = timeline.state(record)
        return {} if course is None else {"course": course}

    def _shown(self, record: RunRecord) -> dict[str, _Piece]:
        pieces, left = {}, _DISPLAY_BYTES
        for rank in record.ranks.values():
            for index, display in enumerate(rank.displays.shown, start=rank.displays.skipped):
                key = f"display_{rank.rank}_{index % KEPT}"
                if self._displays.get(key) is display or (left < display.size_bytes and left < _DISPLAY_BYTES):
                    continue
                left -= display.size_bytes
                self._displays[key] = display
                pieces[key] = {"index": index, **display_state(display)}
        return pieces

    def _lines(self, record: RunRecord) -> dict[str, _Piece]:
        """Return the chunks of output that are new or have grown. An entry's number gives its place in the ring."""
        new = _latest(record.lines_since(self._entries))
        self._entries = record.entry_count
        pieces: dict[str, _Piece] = {}
        for line in new:
            chunk = self._count // CHUNK
            self._chunk = [*self._chunk, _entry(line)] if self._count % CHUNK else [_entry(line)]
            self._count += 1
            pieces[f"lines_{chunk % RING}"] = {"chunk": chunk, "entries": self._chunk}
        return pieces


def _row(record: RunRecord, rank: RankRecord, origin_s: float) -> dict[str, Any]:
    full = row(rank, origin_s)
    metrics = dict(list(full["metrics"].items())[:NAMES])
    shown = {"first": rank.displays.skipped, "count": len(rank.displays.shown)}
    return {
        **full,
        "metrics": metrics,
        "unsent_metrics": len(full["metrics"]) - len(metrics),
        "last_line": clipped(rank.last_line, _LAST_LINE_CHARACTERS),
        "shown": shown,
        "strips": timeline.strips(rank),
        "consequence": is_consequence(record, rank),
    }


def columns(rank: RankRecord, points: int, origin_s: float = 0.0) -> dict[str, Any]:
    """Return a history as columns, `{"step": [1, 2], "at": [0.5, 0.7], "=loss": [0.5, None], "left": 0,
    "not_finite": {"loss": ["nan", 2, 2, True]}}`.

    About `points` points of all metrics together, evenly spaced and always with the last ones, and the number of
    metrics left out. Steps that a later attempt has computed again are left out. `at` is in seconds."""
    most = min(MOST_CHARTS, max(FEWEST_CHARTS, points // FEWEST_POINTS))
    names = list(rank.metrics)[:most]
    kept = [sample for sample in rank.history if not sample.lost]
    samples = _spaced(kept, names, max(FEWEST_POINTS, points // max(FEWEST_CHARTS, len(names))))
    values: dict[str, Any] = {
        "step": [sample.step for sample in samples],
        "at": [round(sample.at_s - origin_s, 1) for sample in samples],
        "left": len(rank.metrics) - len(names),
        "not_finite": {
            name: [odd.word, odd.first, odd.last, odd.is_now] for name, odd in rank.not_finite.items() if name in names
        },
    }
    for name in names:
        values[f"={name}"] = [_short(sample.values.get(name)) for sample in samples]
    return values


def _spaced(kept: Sequence[Sample], names: Sequence[str], most: int) -> list[Sample]:
    """Return about `most` samples, evenly spaced, including the last one; samples of a metric that is reported rarely,
    such as that of a validation, are kept."""
    counts = Counter(name for sample in kept for name in sample.values)
    strides = {name: stride(counts[name], most) for name in names}
    seen: Counter[str] = Counter()
    samples = []
    for sample in kept:
        own = [name for name in sample.values if name in strides]
        if any(seen[name] % strides[name] == 0 for name in own) or not own:
            samples.append(sample)
        seen.update(own)
    return samples if samples[-1] is kept[-1] else [*samples, kept[-1]]


def _short(value: float | None) -> float | str | None:
    """Return the value rounded to five digits, which is finer than a chart can show."""
    return None if value is None else number(float(f"{value:.5g}"))


def _latest(lines: list[Line]) -> list[Line]:
    if len(lines) <= BATCH_LINES:
        return lines
    before = lines[:-BATCH_LINES]
    hidden = sum(line.skipped or not line.cleared for line in before)
    cleared = [line for line in before if line.cleared]
    return [*cleared, Line(rank=None, skipped=hidden), *lines[-BATCH_LINES:]]


def _entry(line: Line) -> dict[str, Any]:
    state = line_state(line)
    return {**state, "text": clipped(line.text, LINE_CHARACTERS)}
