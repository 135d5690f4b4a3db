"""The trace of a run from the parts of its ranks, the sentence on it, and its files, which are new ones, whatever lies
where they go."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.kernel.session.runs import trace_writer
from jupyter_distrib.kernel.session.runs.trace_writer import TraceWriter, merged, sentence
from jupyter_distrib.wire import messages as m
from jupyter_distrib.worker.pytorch import profiler

TRACE, MEMORY = gzip.compress(b'1.0 {"name": "x"}', mtime=0), zlib.compress(b"memory")


def written(notebook: Path, trace: bytes = TRACE, memory: bytes = MEMORY) -> list[str]:
    """Write the trace of a run into a notebook's folder; return the notes about it."""
    notes: list[str] = []
    record = RunRecord(run="aaa-1", label="Cell In[1]", ranks=range(1), world_size=1)
    record.apply(m.Started(run="aaa-1", rank=0, pid=1, device="cpu", at_s=1.0))
    event = m.Profiled(run="aaa-1", rank=0, began_s=0.0, trace=trace, memory=memory)
    TraceWriter(cast("Any", SimpleNamespace(id="aaa-1", note=notes.append)), notebook).observe(event, record)
    return notes


def test_the_files_of_an_earlier_run_are_replaced(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "aaa-1"
    run.mkdir(parents=True)
    for name in ("trace.json.gz", "memory-rank0.pickle"):
        (run / name).write_text("old" * 1000)
    before = os.umask(0o027)
    try:
        notes = written(tmp_path)
    finally:
        os.umask(before)
    assert "runs/aaa-1/trace.json.gz" in notes[0]
    assert '"name": "x"}' in gzip.decompress((run / "trace.json.gz").read_bytes()).decode()
    assert (run / "memory-rank0.pickle").read_bytes() == b"memory"
    assert {path.stat().st_mode & 0o777 for path in run.iterdir()} == {0o640}


@pytest.mark.parametrize(
    ("trace", "memory", "why"),
    [
        (gzip.compress(bytes(2000), mtime=0), b"", "a rank's part is larger than 1.0 kB"),
        (TRACE, zlib.compress(bytes(2000)), "a rank's part is larger than 1.0 kB"),
        (TRACE, b"no zlib", "a rank's part is damaged"),
        (TRACE, MEMORY[:-1], "or has no end"),
        (gzip.compress(b"no line of a trace", mtime=0), b"", "could not convert"),
    ],
    ids=range(5),
)
def test_what_a_rank_sends_is_unpacked_up_to_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trace: bytes, memory: bytes, why: str
) -> None:
    for limit in ("TRACE_BYTES", "MEMORY_BYTES"):
        monkeypatch.setattr(trace_writer, limit, 1000)  # with the real ones, it takes seconds to pack a part
    note = written(tmp_path, trace, memory)[-1]
    assert "could not be written" in note
    assert why in note
    assert sum(each.stat().st_size for each in (tmp_path / "runs" / "aaa-1").iterdir()) < 1000


def test_a_history_of_memory_that_a_rank_sends_is_never_too_large() -> None:
    assert trace_writer.MEMORY_BYTES == profiler.MEMORY_BYTES


@pytest.mark.parametrize("name", ["trace.json.gz", "memory-rank0.pickle"])
def test_no_file_is_written_through_a_link_that_a_colleague_has_put_there(tmp_path: Path, name: str) -> None:
    (tmp_path / "precious").write_text("text")
    run = tmp_path / "runs" / "aaa-1"
    run.mkdir(parents=True)
    (run / name).symlink_to(tmp_path / "precious")
    written(tmp_path)
    assert (tmp_path / "precious").read_text() == "text"
    assert not (run / name).is_symlink()


def test_no_folder_is_written_through_a_link_and_that_is_said(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "trace.json.gz").write_text("precious")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "aaa-1").symlink_to(tmp_path / "elsewhere")
    (note,) = written(tmp_path)
    assert "could not be written into runs/aaa-1" in note
    assert (tmp_path / "elsewhere" / "trace.json.gz").read_text() == "precious"


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
