"""The state of a run as JSON can carry it: everything that a view in the browser gets of a run.

Kernel side; the golden state in `tests/` fixes its shape, for Python and for JavaScript. `head`, `row`, `history` and
`displays` are parts of it that change at different paces.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from jupyter_distrib.kernel.analysis import failures
from jupyter_distrib.kernel.analysis.shares import Shares
from jupyter_distrib.kernel.analysis.traceback_text import fingerprint, innermost, where
from jupyter_distrib.kernel.views import markup, shares, stacks
from jupyter_distrib.wire import messages as m

if TYPE_CHECKING:
    from jupyter_distrib.kernel.record.displays import Display
    from jupyter_distrib.kernel.record.output_lines import Line
    from jupyter_distrib.kernel.record.rank_record import RankRecord
    from jupyter_distrib.kernel.record.record import RunRecord


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
    """Return the time from which the times of a state are counted."""
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
        "kept": dict(rank.kept),
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
    """Return the reported numbers, with a mark at steps that a later attempt has computed again."""
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
