"""The state of a run in pieces, each under its own key, so that a browser gets only the pieces that have changed.

Kernel side, in the thread that shows the run; no clock. Put together again (`assemble` in `static/state.js`) the pieces
are the result of `state.state_of`, with thinned histories:

    head            the run as a whole
    rank_3          one rank: state, progress, metrics, memory, last line, lines that are not finished
    history_3       its reported numbers, column by column, thinned to what a small chart can show
    course          how far ranks were behind over time
    display_3_0     its displays, one by one
    lines_7         output: a ring of `RING` chunks; only the newest of them grows

Everything is bounded, whatever the ranks do: keys are used again, and a batch beyond `BATCH_LINES` has a gap.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from jupyter_distrib.kernel.analysis.failures import is_consequence
from jupyter_distrib.kernel.record.displays import KEPT, Display
from jupyter_distrib.kernel.record.output_lines import Line
from jupyter_distrib.kernel.record.rank_record import RankRecord, Sample
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.kernel.views import state as run_state
from jupyter_distrib.kernel.views import timeline
from jupyter_distrib.system.formatting import clipped

CHUNK = 50
RING = 24
BATCH_LINES = 100
LINE_CHARACTERS = 500
LAST_LINE_CHARACTERS = 200
NAMES = 12
"""The number of a rank's metrics that are sent, with a count of the others; the record has all."""
FEWEST_CHARTS, MOST_CHARTS = 6, 24
"""The least and the greatest number of charts of a rank: fewer for more ranks."""
POINTS = 12_000
"""The number of points of all charts and ranks together."""
FEWEST_POINTS = 30
"""The least number of points of a line."""
HISTORY_EVERY_S = 1.0
COURSE_EVERY_S = 4.0
DISPLAY_BYTES = 2_000_000
"""The most bytes of displays in one update; further displays wait for the next."""

Piece = Any


class StateDelta:
    """The changes between the state that the browser has and the new one."""

    def __init__(self, pool: str) -> None:
        self.now: dict[str, Piece] = {}
        """All pieces as they were last sent; replaced, never mutated, so that any thread may read them."""
        self._pool = pool
        self._entries = 0
        self._count = 0
        self._chunk: list[dict[str, Any]] = []
        self._histories: dict[int, tuple[Sample, float]] = {}
        """The newest sample that was sent of each rank, with the time."""
        self._displays: dict[str, Display] = {}
        self._course_at_s = float("-inf")

    def changed(self, record: RunRecord, now_s: float, *, stopping: str = "") -> dict[str, Piece]:
        """Return the pieces that differ from the pieces sent before."""
        of_run = {"elapsed_s": 0, "pool": self._pool, "stopping": stopping, "numbers": list(record.ranks)}
        pieces: dict[str, Piece] = {"head": {**run_state.head(record), **of_run}}
        origin_s = run_state.origin(record)
        unfinished: dict[int | None, list[dict[str, Any]]] = {}
        for line in record.partial_lines():
            unfinished.setdefault(line.rank, []).append(_entry(line))
        for rank in record.ranks.values():
            pieces[f"rank_{rank.rank}"] = {**_row(rank, origin_s), "unfinished": unfinished.get(rank.rank, [])}
            pieces |= self._history(rank, now_s, len(record.ranks), origin_s)
        pieces |= self._course(record, now_s)
        pieces |= self._shown(record)
        pieces |= self._lines(record)
        new = {key: piece for key, piece in pieces.items() if key not in self.now or self.now[key] != piece}
        self.now = {**self.now, **new}
        return new

    def _history(self, rank: RankRecord, now_s: float, ranks: int, origin_s: float) -> dict[str, Piece]:
        before, at_s = self._histories.get(rank.rank, (None, now_s - HISTORY_EVERY_S))
        if not rank.history or rank.history[-1] is before or now_s - at_s < HISTORY_EVERY_S:
            return {}
        self._histories[rank.rank] = rank.history[-1], now_s
        return {f"history_{rank.rank}": columns(rank, POINTS // ranks, origin_s)}

    def _course(self, record: RunRecord, now_s: float) -> dict[str, Piece]:
        """Return the course of the run, now and then: it is drawn over the whole run."""
        if len(record.ranks) < 2 or (now_s - self._course_at_s < COURSE_EVERY_S and not record.ended):
            return {}
        self._course_at_s = now_s
        course = timeline.state(record)
        return {} if course is None else {"course": course}

    def _shown(self, record: RunRecord) -> dict[str, Piece]:
        pieces, left = {}, DISPLAY_BYTES
        for rank in record.ranks.values():
            for index, display in enumerate(rank.displays.shown, start=rank.displays.skipped):
                key = f"display_{rank.rank}_{index % KEPT}"
                if self._displays.get(key) is display or (left < display.size_bytes and left < DISPLAY_BYTES):
                    continue
                left -= display.size_bytes
                self._displays[key] = display
                pieces[key] = {"index": index, **run_state.display_state(display)}
        return pieces

    def _lines(self, record: RunRecord) -> dict[str, Piece]:
        """Return the chunks of output that are new or have grown. An entry's number gives its place in the ring."""
        new = _latest(record.lines_since(self._entries))
        self._entries = record.entry_count
        pieces: dict[str, Piece] = {}
        for line in new:
            chunk = self._count // CHUNK
            self._chunk = [*self._chunk, _entry(line)] if self._count % CHUNK else [_entry(line)]
            self._count += 1
            pieces[f"lines_{chunk % RING}"] = {"chunk": chunk, "entries": self._chunk}
        return pieces


def _row(rank: RankRecord, origin_s: float) -> dict[str, Any]:
    row = run_state.row(rank, origin_s)
    metrics = dict(list(row["metrics"].items())[:NAMES])
    shown = {"first": rank.displays.skipped, "count": len(rank.displays.shown)}
    return {
        **row,
        "metrics": metrics,
        "unsent_metrics": len(row["metrics"]) - len(metrics),
        "last_line": clipped(rank.last_line, LAST_LINE_CHARACTERS),
        "shown": shown,
        "strips": timeline.strips(rank),
        "consequence": rank.failure is not None and is_consequence(rank),
    }


def columns(rank: RankRecord, points: int, origin_s: float = 0.0) -> dict[str, Any]:
    """Return a history as columns, `{"step": [1, 2], "at": [0.5, 0.7], "=loss": [0.5, None], "left": 0}`.

    About `points` points of all metrics together, evenly spaced and always with the last ones, and the number of
    metrics left out. Steps that a later attempt has computed again are not among them. `at` is in seconds."""
    most = min(MOST_CHARTS, max(FEWEST_CHARTS, points // FEWEST_POINTS))
    names = list(rank.metrics)[:most]
    kept = [sample for sample in rank.history if not sample.lost]
    samples = _spaced(kept, names, max(FEWEST_POINTS, points // max(FEWEST_CHARTS, len(names))))
    values: dict[str, Any] = {
        "step": [sample.step for sample in samples],
        "at": [round(sample.at_s - origin_s, 1) for sample in samples],
        "left": len(rank.metrics) - len(names),
    }
    for name in names:
        values[f"={name}"] = [_short(sample.values.get(name)) for sample in samples]
    return values


def _spaced(kept: Sequence[Sample], names: Sequence[str], most: int) -> list[Sample]:
    """Return about `most` samples, evenly spaced, the last one among them; those of a metric that is reported now and
    then, such as that of a validation, stay."""
    counts = Counter(name for sample in kept for name in sample.values)
    strides = {name: -(-counts[name] // most) or 1 for name in names}
    seen: Counter[str] = Counter()
    samples = []
    for sample in kept:
        own = [name for name in sample.values if name in strides]
        if any(seen[name] % strides[name] == 0 for name in own) or not own:
            samples.append(sample)
        seen.update(own)
    return samples if samples[-1] is kept[-1] else [*samples, kept[-1]]


def _short(value: float | None) -> float | str | None:
    """Return the value rounded to five digits, which are more than a chart shows."""
    return None if value is None else run_state.number(float(f"{value:.5g}"))


def _latest(lines: list[Line]) -> list[Line]:
    if len(lines) <= BATCH_LINES:
        return lines
    before = lines[:-BATCH_LINES]
    hidden = sum(line.skipped or not line.cleared for line in before)
    cleared = [line for line in before if line.cleared]
    return [*cleared, Line(rank=None, skipped=hidden), *lines[-BATCH_LINES:]]


def _entry(line: Line) -> dict[str, Any]:
    state = run_state.line_state(line)
    return {**state, "text": clipped(line.text, LINE_CHARACTERS)}
