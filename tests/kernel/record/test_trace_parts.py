"""The trace of a run from the parts of its ranks, and the sentence on it."""

from __future__ import annotations

import gzip
import json

from jupyter_distrib.kernel.session.runs.trace_writer import merged, sentence
from jupyter_distrib.wire import messages as m


def part(rank: int, began_s: float, *, busy_s: float = 0.4, wait_s: float = 0.4, note: str = "") -> m.Profiled:
    line = f'5.000 {{"ph":"X","name":"aten::mm","pid":{100 * rank},"tid":7,"dur":2.5}}'
    return m.Profiled(
        run="r",
        rank=rank,
        trace=gzip.compress(line.encode()),
        began_s=began_s,
        first_step=4,
        steps=8,
        seconds=0.8,
        phases={"forward": busy_s, "collective": wait_s, "data": 0.001},
        busiest={"aten::mm": 0.2},
        note=note,
    )


def test_the_clocks_of_the_ranks_are_aligned() -> None:
    trace = json.loads("".join(merged({1: part(1, 700.0), 0: part(0, 700.25)})))

    assert [(event["pid"], event["ts"]) for event in trace["traceEvents"]] == [(0, 250_005.0), (100, 5.0)]


def test_the_sentence_names_the_steps_the_phases_and_the_slow_rank() -> None:
    text = sentence({0: part(0, 0.0, busy_s=0.2, wait_s=0.6), 1: part(1, 0.0)}, (0, 1), "runs/r/trace.json.gz")

    assert text == (
        "runs/r/trace.json.gz shows steps 4-11 on ranks 0-1; open it at https://ui.perfetto.dev or in chrome://tracing. "
        "A step takes 100 ms: collectives 62%, the forward pass 38%. Most time in one operator by itself: aten::mm, 25%. "
        "Rank 1 works 2.0 times as long on a step as rank 0."
    )


def test_ranks_without_a_part_are_named_with_the_reason() -> None:
    none = m.Profiled(run="r", rank=1, note="it is tired")

    assert "on rank 0; " in (text := sentence({0: part(0, 0.0), 1: none}, (0, 1, 2), "f"))
    assert text.endswith("Rank 1: it is tired. Rank 2: it ended before it could send its part.")
    assert sentence({1: none}, (1,), "") == "--profile has recorded nothing (rank 1: it is tired)"
