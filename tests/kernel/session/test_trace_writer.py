"""The files of a trace are new ones, whatever lies where they go."""

from __future__ import annotations

import gzip
import os
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.kernel.session.runs.trace_writer import TraceWriter
from jupyter_distrib.wire import messages as m


def written(notebook: Path) -> list[str]:
    """Write the trace of a run into a notebook's folder; return the notes about it."""
    notes: list[str] = []
    record = RunRecord(run="aaa-1", label="Cell In[1]", ranks=range(1), world_size=1)
    record.apply(m.Started(run="aaa-1", rank=0, pid=1, device="cpu", at_s=1.0))
    trace, memory = gzip.compress(b'1.0 {"name": "x"}'), zlib.compress(b"memory")
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
