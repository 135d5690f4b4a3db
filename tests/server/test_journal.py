"""The journal of a detached run: what is replayed from it, and what a long one leaves out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.server import journal as journals
from jupyter_distrib.server.journal import Entry, Journal, thinned
from jupyter_distrib.wire import messages as m


def detached() -> m.Execute:
    return m.Execute(
        run="s-7",
        group="c",
        ranks=(0, 1),
        cell=m.Cell(source="1", filename="Cell In[1]"),
        inputs=m.Parcel(data=b""),
        setting=m.Setting(strategy="ddp"),
        detached=True,
        label="Cell In[1]",
    )


def test_a_journal_replays_what_happened(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    workers = (m.WorkerInfo(rank=0, pid=7, device="cuda:0", device_name="NVIDIA H200 (GPU 3)"),)
    journal = Journal(detached(), workers, 4, gpus=True, notebook="")
    with (tmp_path / "value").open("w+b") as value:
        value.write(b"big")
        value.flush()
        journal.add(m.Returned(run="s-7", rank=0, value=None), (value.fileno(),))
    assert not journal.ended
    journal.add(m.Ended(run="s-7", at_s=1.0), ())
    assert journal.ended
    (first, fds), (last, none) = journal.entries()
    assert isinstance(first, m.Returned)
    assert os.pread(*fds, 10, 0) == b"big", "its own descriptor, not the caller's"
    assert isinstance(last, m.Ended)
    assert len(none) == 0
    told = journal.attached(followed=False)
    assert (told.run, told.ranks, told.world_size, told.gpus, told.strategy) == ("s-7", (0, 1), 4, True, "ddp")
    assert told.workers == workers
    elapsed_s = told.elapsed_s
    assert journal.attached(followed=True).elapsed_s == elapsed_s, "the clock stops with the run"
    journal.close()
    assert len(os.listdir("/proc/self/fd")) == before


def sample(rss_bytes: int) -> m.Sampled:
    return m.Sampled(
        run="s-7", rank=0, rss_bytes=rss_bytes, cpu_percent=1.0, gpu_memory_bytes=None, gpu_memory_total_bytes=None,
        gpu_percent=None, at_s=0.0,
    )  # fmt: skip


def test_a_long_journal_knows_the_peak() -> None:
    journal = Journal(detached(), (), 2, gpus=False, notebook="")
    for number in range(3 * journals.MAX_ENTRIES):
        journal.add(sample(10**9 if number == 99 else number), ())
    samples = [event.rss_bytes for event, _ in journal.entries() if isinstance(event, m.Sampled)]
    assert len(samples) <= journals.MAX_ENTRIES
    assert (max(samples), samples[-1]) == (10**9, 3 * journals.MAX_ENTRIES - 1)


def test_a_long_journal_says_how_much_output_it_leaves_out() -> None:
    journal, record = (
        Journal(detached(), (), 2, gpus=False, notebook=""),
        RunRecord(run="s-7", label="", ranks=(0, 1), world_size=2),
    )
    count = 5 * journals.MAX_ENTRIES
    for number in range(count):
        journal.add(m.Wrote(run="s-7", rank=number % 2, stream="stdout", text=f"line {number}\n"), ())
    journal.add(m.Returned(run="s-7", rank=0, value=None), ())
    for number in range(count, 2 * count):
        journal.add(m.Wrote(run="s-7", rank=1, stream="stdout", text=f"line {number}\n"), ())
    journal.add(m.Ended(run="s-7", at_s=1.0), ())
    entries = [event for event, _ in journal.entries()]
    assert len(entries) <= journals.MAX_ENTRIES
    for event in entries:
        record.apply(event)  # type: ignore[arg-type]
    told = [event for event in entries if isinstance(event, m.Wrote)]
    for rank, lines in ((0, count // 2), (1, count // 2 + count)):
        assert lines == sum(e.skipped_lines + e.text.count("\n") for e in told if e.rank == rank)
    *_, last = record.lines_since()
    assert last.text == f"line {2 * count - 1}"
    ends = [index for index, event in enumerate(entries) if getattr(event, "rank", None) == 0]
    assert isinstance(entries[ends[-1]], m.Returned), "a rank says nothing after its end"


def test_a_long_journal_spans_all_that_was_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what it costs to keep it short grows with the events, not with their square."""
    looked_at: list[int] = []

    def counted(entries: Sequence[Entry]) -> tuple[list[Entry], list[m.Displayed]]:
        looked_at.append(len(entries))
        return thinned(entries)

    monkeypatch.setattr(journals, "thinned", counted)
    journal, count = Journal(detached(), (), 2, gpus=False, notebook=""), 6 * journals.MAX_ENTRIES
    journal.add(measured(0, 0, lr=0.1), ())
    for step in range(count):
        journal.add(measured(step % 2, step, loss=1.0), ())
        journal.add(m.Progressed(run="s-7", rank=0, label="epoch", step=step, total=count, at_s=0.0), ())
    entries = [event for event, _ in journal.entries()]
    assert len(entries) <= journals.MAX_ENTRIES
    assert sum(looked_at) <= 4 * 2 * count
    reported = [event for event in entries if isinstance(event, m.Measured)]
    assert reported[0].values == {"lr": 0.1}
    steps = [event.step for event in reported]
    assert steps == sorted(steps)
    assert steps[1] < count // 10
    assert steps[-1] == count - 1
    assert max(event.step for event in entries if isinstance(event, m.Progressed)) == count - 1


def test_a_long_journal_is_bounded_whatever_is_told() -> None:
    journal, count = Journal(detached(), (), 2, gpus=False, notebook=""), 3 * journals.MAX_ENTRIES
    for number in range(count):
        journal.add(m.Noted(run="s-7", rank=0, text=str(number)), ())
        journal.add(m.Stalled(run="s-7", text=str(number), places=(), at_s=0.0), ())
        journal.add(m.Moved(run="s-7", at_s=0.0), ())
        journal.add(m.Displayed(run="s-7", rank=0, data={"text/plain": "x"}, metadata={}, at_s=0.0), ())
    entries = [event for event, _ in journal.entries()]
    assert len(entries) <= journals.MAX_ENTRIES + 1
    left = sum(isinstance(event, m.Displayed) for event in entries)
    assert entries[0] == m.Noted(run="s-7", rank=None, text=f"{count - left} older displays are left out.")


def measured(rank: int, step: int, **values: float) -> m.Measured:
    return m.Measured(run="s-7", rank=rank, step=step, values=values, at_s=0.0)


def test_a_journal_holds_so_many_bytes_of_displays() -> None:
    journal = Journal(detached(), (), 2, gpus=False, notebook="")
    for number in range(10):
        data = {"text/plain": str(number), "image/png": "x" * (journals.MAX_DISPLAY_BYTES // 4)}
        journal.add(m.Displayed(run="s-7", rank=0, data=data, metadata={}, at_s=0.0), ())
    kept = [event.data["text/plain"] for event, _ in journal.entries() if isinstance(event, m.Displayed)]
    assert kept == ["7", "8", "9"]


def test_a_long_journal_loses_old_output_only() -> None:
    journal = Journal(detached(), (), 2, gpus=False, notebook="")
    journal.add(m.Noted(run="s-7", rank=None, text="first"), ())
    for number in range(4 * journals.MAX_ENTRIES):
        journal.add(m.Wrote(run="s-7", rank=0, stream="stdout", text=str(number)), ())
        journal.add(m.Progressed(run="s-7", rank=0, label="", step=number, total=None, at_s=0.0), ())
    entries = [event for event, _ in journal.entries()]
    assert len(entries) <= journals.MAX_ENTRIES + 1
    assert isinstance(entries[0], m.Noted)
    assert isinstance(entries[-1], m.Progressed)
    assert entries[-1].step == 4 * journals.MAX_ENTRIES - 1
