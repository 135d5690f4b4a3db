"""A run's state in pieces: only what has changed is sent, nothing grows without end, and together they are the state."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.kernel.views.state import (
    BATCH_LINES,
    CHUNK,
    FEWEST_CHARTS,
    FEWEST_POINTS,
    HISTORY_EVERY_S,
    LINE_CHARACTERS,
    MOST_CHARTS,
    NAMES,
    POINTS,
    RING,
    StateDelta,
    state_of,
)
from jupyter_distrib.wire import messages as m
from tests.kernel.record import golden_run


def a_record(ranks: int = 2) -> RunRecord:
    record = RunRecord(run="r-7", label="Cell In[5]", ranks=range(ranks), world_size=ranks)
    for rank in range(ranks):
        record.apply(m.Started(run="r-7", rank=rank, pid=100 + rank, device="cpu", at_s=1.0))
    return record


def wrote(text: str, rank: int = 0) -> m.Wrote:
    return m.Wrote(run="r-7", rank=rank, stream="stdout", text=text, at_s=2.0)


def displayed(text: str, *, display_id: str = "", update: bool = False) -> m.Displayed:
    data = {"text/plain": text}
    return m.Displayed(run="r-7", rank=0, data=data, metadata={}, display_id=display_id, update=update, at_s=2.0)


def entries(pieces: StateDelta) -> list[dict[str, Any]]:
    chunks = sorted((value for key, value in pieces.now.items() if key.startswith("lines_")), key=lambda c: c["chunk"])
    return [entry for chunk in chunks for entry in chunk["entries"]]


def test_the_pieces_of_the_golden_run_are_its_state() -> None:
    record, pieces = golden_run.golden_record(), StateDelta("local")
    pieces.changed(record, 0.0)
    state = state_of(record)

    head = {key: value for key, value in state.items() if key not in ("ranks", "lines")}
    assert {**pieces.now["head"], "elapsed_s": 17.0}.items() >= head.items()
    for rank in state["ranks"]:
        row = pieces.now[f"rank_{rank['rank']}"]
        expected = {key: value for key, value in rank.items() if key not in ("history", "displays", "skipped_displays")}
        assert {**row, **expected} == row
        for index, display in enumerate(rank["displays"]):
            assert pieces.now[f"display_{rank['rank']}_{index}"].items() >= display.items()
    assert entries(pieces) == state["lines"]


def test_only_what_has_changed_is_sent() -> None:
    record, pieces = a_record(), StateDelta("local")
    assert {"head", "rank_0", "rank_1"} <= pieces.changed(record, 0.0).keys()

    assert pieces.changed(record, 0.1) == {}
    record.apply(wrote("x\n", rank=1))
    assert pieces.changed(record, 0.2).keys() == {"head", "rank_1", "lines_0"}


def test_the_ring_of_lines_keeps_its_size_and_the_newest_lines() -> None:
    record, pieces = a_record(), StateDelta("local")
    for number in range(3 * CHUNK * RING):
        record.apply(wrote(f"{number}\n"))
        if number % 7 == 0:
            pieces.changed(record, 0.0)
    pieces.changed(record, 0.0)

    assert len([key for key in pieces.now if key.startswith("lines_")]) == RING
    texts = [entry["text"] for entry in entries(pieces)]
    assert texts == [str(number) for number in range(3 * CHUNK * RING)][-len(texts) :]
    assert len(texts) > CHUNK * (RING - 1)


def test_a_flood_is_cut_and_counted() -> None:
    record, pieces = a_record(), StateDelta("local")
    record.apply(wrote("".join(f"{number}\n" for number in range(1000))))
    pieces.changed(record, 0.0)

    gap, *rest = entries(pieces)
    assert (gap["skipped"], len(rest)) == (1000 - BATCH_LINES, BATCH_LINES)
    assert rest[-1]["text"] == "999"


def test_a_long_line_is_cut() -> None:
    record, pieces = a_record(), StateDelta("local")
    record.apply(wrote("x" * 3000 + "\n"))
    pieces.changed(record, 0.0)

    assert len(entries(pieces)[0]["text"]) < LINE_CHARACTERS + 50
    assert len(pieces.now["rank_0"]["last_line"]) < LINE_CHARACTERS


def test_histories_are_thinned_and_seldom() -> None:
    record, pieces = a_record(), StateDelta("local")
    for step in range(900):
        for rank in range(2):
            record.apply(m.Measured(run="r-7", rank=rank, step=step, values={"loss": 1 / (step + 1)}, at_s=2.0))
    assert pieces.changed(record, 0.0).keys() >= {"history_0", "history_1"}
    columns = pieces.now["history_0"]
    assert len(columns["step"]) == len(columns["=loss"]) <= POINTS // 2 // FEWEST_CHARTS + 1
    assert columns["step"][-1] == 899

    record.apply(m.Measured(run="r-7", rank=0, step=900, values={"loss": float("nan")}, at_s=3.0))
    assert "history_0" not in pieces.changed(record, HISTORY_EVERY_S / 2)
    assert pieces.changed(record, HISTORY_EVERY_S)["history_0"]["=loss"][-1] == "nan"


def test_a_display_is_sent_once_and_again_when_it_is_updated() -> None:
    record, pieces = a_record(), StateDelta("local")
    record.apply(displayed("one", display_id="a"))
    record.apply(displayed("two"))
    assert pieces.changed(record, 0.0)["display_0_1"]["data"] == {"text/plain": "two"}

    record.apply(displayed("three", display_id="a", update=True))
    changed = pieces.changed(record, 0.1)
    assert [key for key in changed if key.startswith("display")] == ["display_0_0"]
    assert changed["display_0_0"]["data"] == {"text/plain": "three"}

    record.apply(m.Cleared(run="r-7", rank=0, at_s=3.0))
    pieces.changed(record, 0.2)
    assert pieces.now["rank_0"]["shown"]["count"] == 0


def test_displays_that_are_large_wait_for_the_next_message() -> None:
    record, pieces = a_record(), StateDelta("local")
    for _ in range(3):
        record.apply(displayed("x" * 1_500_000))

    for _ in range(3):
        assert len(json.dumps(pieces.changed(record, 0.0))) < 2_000_000
    assert {"display_0_0", "display_0_1", "display_0_2"} <= pieces.now.keys()


def test_any_thread_may_read_what_was_given_out() -> None:
    record, pieces = a_record(), StateDelta("local")
    pieces.changed(record, 0.0)
    before = pieces.now
    copy = json.dumps(before)
    record.apply(wrote("x\n"))
    record.apply(
        m.Sampled(run="r-7", rank=0, rss_bytes=5, cpu_percent=1.0, gpu_memory_bytes=None, gpu_memory_total_bytes=None, gpu_percent=None, at_s=3.0)
    )  # fmt: skip
    pieces.changed(record, 1.0)

    assert json.dumps(before) == copy


@pytest.mark.parametrize(("ranks", "sent"), [(2, MOST_CHARTS), (512, FEWEST_CHARTS)])
def test_numbers_that_are_not_sent_are_counted(ranks: int, sent: int) -> None:
    record, pieces = a_record(ranks), StateDelta("local")
    for step in range(1, 200):
        values = {f"number {index}": float(step) for index in range(30)}
        record.apply(m.Measured(run="r-7", rank=1, step=step, values=values, at_s=2.0))
    pieces.changed(record, 0.0)

    columns = pieces.now["history_1"]
    names = [name for name in columns if name.startswith("=")]
    assert names == [f"=number {index}" for index in range(sent)]
    assert columns["left"] == 30 - sent
    assert len(names) * len(columns["step"]) <= max(POINTS // ranks, FEWEST_POINTS * FEWEST_CHARTS) + len(names)


def test_numbers_that_are_reported_now_and_then_are_all_sent() -> None:
    record, pieces = a_record(512), StateDelta("local")
    for step in range(900):
        record.apply(m.Measured(run="r-7", rank=0, step=step, values={"loss": 0.1}, at_s=1.0 + step))
        if step % 91 == 90:
            record.apply(m.Measured(run="r-7", rank=0, step=step, values={"val/loss": 0.2}, at_s=1.5 + step))
    pieces.changed(record, 0.0)

    columns = pieces.now["history_0"]
    assert sum(value is not None for value in columns["=val/loss"]) == 9
    assert len(columns["step"]) < 2 * FEWEST_POINTS + 9
    assert columns["at"][-1] == 899.0


def test_metrics_that_are_not_sent_with_their_rank_are_counted() -> None:
    record, pieces = a_record(1), StateDelta("local")
    values = {f"m{number}": float(number) for number in range(NAMES + 3)}
    record.apply(m.Measured(run="r-7", rank=0, step=1, values=values, at_s=2.0))
    row = pieces.changed(record, 0.0)["rank_0"]
    assert list(row["metrics"]) == list(values)[:NAMES]
    assert row["unsent_metrics"] == 3


def test_a_line_that_is_not_finished_is_with_its_rank() -> None:
    record, pieces = a_record(), StateDelta("local")
    record.apply(wrote("loading..."))
    pieces.changed(record, 0.0)
    (line,) = pieces.now["rank_0"]["unfinished"]
    assert (line["text"], line["stream"]) == ("loading...", "stdout")
    assert pieces.now["rank_1"]["unfinished"] == []
    assert entries(pieces) == []

    record.apply(wrote(" done\n"))
    pieces.changed(record, 0.1)
    assert pieces.now["rank_0"]["unfinished"] == []
    assert [entry["text"] for entry in entries(pieces)] == ["loading... done"]
