"""`RunRecord`: events in, state out."""

from __future__ import annotations

import inspect
import io
import json
import re
import time
from collections.abc import Iterator
from math import inf, nan

import pytest

from jupyter_distrib.kernel.analysis.traceback_text import fingerprint
from jupyter_distrib.kernel.record import rank_record
from jupyter_distrib.kernel.record import record as run_record
from jupyter_distrib.kernel.record.displays import KEPT, KEPT_BYTES
from jupyter_distrib.kernel.record.record import HISTORY, NOT_FINITE, RunRecord
from jupyter_distrib.kernel.record.terminal_stream import LINE_CHARACTERS, Progress, Stream, parse_bar, without_codes
from jupyter_distrib.kernel.views.state import state_of
from jupyter_distrib.kernel.views.text import as_text, remarks
from jupyter_distrib.wire import messages as m
from tests.kernel.record import golden_run


def a_record(*events: m.RunEvent, ranks: int = 2) -> RunRecord:
    record = RunRecord(run="r-7", label="Cell In[5]", ranks=range(ranks), world_size=ranks, strategy="ddp")
    for event in events:
        record.apply(event)
    return record


def started(rank: int, at_s: float = 10.0) -> m.Started:
    return m.Started(run="r-7", rank=rank, pid=100 + rank, device="cpu", at_s=at_s)


def wrote(text: str, rank: int = 0, *, stream: str = "stdout", skipped: int = 0) -> m.Wrote:
    return m.Wrote(run="r-7", rank=rank, stream=stream, text=text, skipped_lines=skipped, at_s=11.0)


def returned(rank: int, at_s: float = 12.0) -> m.Returned:
    return m.Returned(run="r-7", rank=rank, value=None, at_s=at_s)


def exited(rank: int, *, code: int | None = -9, asked: bool = False) -> m.Exited:
    return m.Exited(run="r-7", rank=rank, pid=100 + rank, exit_code=code, asked=asked, at_s=12.5)


def texts(record: RunRecord) -> list[str]:
    return [f"{line.rank}: {line.text}" if not line.skipped else f"({line.skipped})" for line in record.lines_since()]


# ---------------------------------------------------------------------------------------------------- states


def test_a_rank_waits_runs_and_is_done() -> None:
    record = a_record()
    assert record.ranks[0].state == "waiting"
    record.apply(started(0))
    assert (record.ranks[0].state, record.ranks[0].pid, record.ranks[0].device) == ("running", 100, "cpu")
    parcel, kept = m.Parcel(data=b"x"), m.KeptNames(types={"model": "Net"})
    record.apply(m.Returned(run="r-7", rank=0, value=parcel, kept=kept, at_s=11.0, exited_early=True))
    rank = record.ranks[0]
    assert (rank.state, rank.value, rank.kept, rank.exited_early, rank.ended_at_s) == (
        "done", parcel, kept, True, 11.0,
    )  # fmt: skip


def test_a_rank_that_returned_at_once_tells_when_it_began() -> None:
    record = a_record(m.Returned(run="r-7", rank=0, value=None, began_at_s=10.0, at_s=10.5), started(1, at_s=10.25))
    assert (record.ranks[0].state, record.ranks[0].started_at_s, record.elapsed_s) == ("done", 10.0, 0.5)
    record.apply(m.Returned(run="r-7", rank=1, value=None, began_at_s=10.125, at_s=11.0))
    assert record.ranks[1].started_at_s == 10.25, "its start was an event of its own"


def test_what_is_known_of_workers_before_the_run_is_taken_over() -> None:
    worker = m.WorkerInfo(rank=1, pid=7, device="cuda:0", device_name="NVIDIA H200 (GPU 3)", state="starting")
    record = RunRecord(run="r", label="", ranks=(1,), world_size=2, gpus=True, workers=[worker])
    assert (record.ranks[1].state, record.ranks[1].device_name) == ("starting", "NVIDIA H200 (GPU 3)")


def test_a_rank_that_failed_stays_failed_when_its_process_ends() -> None:
    record = a_record(
        started(0),
        m.Failed(run="r-7", rank=0, failure=m.Failure(type_name="KeyError", message="'lr'"), at_s=11.0),
        exited(0, asked=True),
    )
    assert record.ranks[0].state == "failed"
    assert record.ranks[0].gone


@pytest.mark.parametrize(("asked", "state"), [(False, "lost"), (True, "done")])
def test_a_process_that_dies_after_its_value_came_is_lost_unless_we_ended_it(asked: bool, state: str) -> None:
    record = a_record(started(0), returned(0), exited(0, asked=asked))
    assert record.ranks[0].state == state
    assert record.ranks[0].returned


def test_an_interrupted_rank_says_where_it_was() -> None:
    frames = (m.Frame(filename="Cell In[5]", line=3, function="<module>"),)
    record = a_record(started(0), m.Interrupted(run="r-7", rank=0, frames=frames, at_s=12.0))
    assert (record.ranks[0].state, record.ranks[0].stopped_at) == ("interrupted", frames)


def test_a_run_is_ok_when_every_rank_is_done() -> None:
    record = a_record(started(0), started(1), returned(0))
    assert not record.ok
    record.apply(returned(1, at_s=13.5))
    record.apply(m.Ended(run="r-7", at_s=14.0, log_directory="/tmp/logs"))
    assert (record.ok, record.ended, record.log_directory, record.elapsed_s) == (True, True, "/tmp/logs", 4.0)


def test_the_time_limit_that_ended_a_run_is_kept() -> None:
    assert a_record(m.TimedOut(run="r-7", limit_s=60.0, at_s=1.0)).limit_s == 60.0


def test_an_event_of_another_run_is_refused() -> None:
    with pytest.raises(ValueError, match="r-8"):
        a_record(m.Ended(run="r-8", at_s=1.0))


def test_metric_history_is_thinned_but_spans_the_whole_run() -> None:
    record = a_record(
        *(m.Measured(run="r-7", rank=0, step=n, values={"loss": 1.0 / (n + 1)}, at_s=n) for n in range(5 * HISTORY))
    )
    history = record.ranks[0].history
    assert len(history) <= HISTORY
    assert (history[0].step < HISTORY // 10, history[-1].step) == (True, 5 * HISTORY - 1)


def reported(step: int, rank: int = 0, **values: float) -> m.Measured:
    return m.Measured(run="r-7", rank=rank, step=step, values=values, at_s=1.0 + step)


def test_a_value_that_becomes_nan_or_infinite_is_named_once_with_its_step_and_ranks() -> None:
    record = a_record(
        *(reported(step, rank, loss=nan if step >= 2 else 0.5, norm=-inf) for step in range(4) for rank in (0, 1))
    )
    assert record.not_finite == {"norm is -inf at step 0": [0, 1], "loss is nan at step 2": [0, 1]}
    assert [line for line in remarks(record) if "loss" in line] == ["· ranks 0-1: loss is nan at step 2"]
    assert {"rank": 1, "text": "loss is nan at step 2"} in state_of(record)["notes"]


def test_only_the_first_values_that_are_not_finite_are_named() -> None:
    record = a_record(*(reported(step, **{f"loss{step}": nan}) for step in range(50)))
    assert len(record.not_finite) == NOT_FINITE


def test_the_state_is_plain_json_also_for_numbers_that_json_lacks() -> None:
    failure = m.Failure(type_name="E", message="m")
    record = a_record(
        started(0, at_s=10.0),
        wrote("hello\n"),
        m.Progressed(run="r-7", rank=0, label="epoch", step=1, total=3, at_s=11.0),
        m.Measured(run="r-7", rank=0, step=1, values={"loss": float("nan")}, at_s=11.5),
        m.Noted(run="r-7", rank=None, text="utils.py changed"),
        m.Failed(run="r-7", rank=0, failure=failure, at_s=12.0),
        exited(1),
        m.Ended(run="r-7", at_s=13.0),
    )
    state = json.loads(json.dumps(state_of(record), allow_nan=False))
    unused = {
        "stack": None,
        "rss_bytes": 0,
        "peak_rss_bytes": 0,
        "cpu_percent": 0.0,
        "gpu_memory_bytes": None,
        "peak_gpu_memory_bytes": None,
        "gpu_memory_total_bytes": None,
        "gpu_percent": None,
        "gpu_tensor_bytes": None,
        "gpu_reserved_bytes": None,
        "gpu_memory_of_all": False,
        "displays": [],
        "skipped_displays": 0,
    }
    assert state.pop("ranks") == [
        {
            "rank": 0,
            "state": "failed",
            "pid": 100,
            "device": "cpu",
            "device_name": "",
            "progress": [{"label": "epoch", "step": 1, "total": 3, "rate": None, "unit": "it", "detail": ""}],
            "metrics": {"loss": "nan"},
            "metrics_step": 1,
            "history": [{"step": 1, "values": {"loss": "nan"}}],
            "last_line": "hello",
            "failure": {"type": "E", "message": "m", "where": "", "traceback": fingerprint(failure)},
            "exit": None,
            "kept": {},
            "exited_early": False,
            **unused,
            "started_s": 0.0,
            "ended_s": 2.0,
        },
        {
            "rank": 1,
            "state": "lost",
            "pid": 0,
            "device": "",
            "device_name": "",
            "progress": [],
            "metrics": {},
            "metrics_step": 0,
            "history": [],
            "last_line": "",
            "failure": None,
            "exit": {"code": -9, "asked": False, "reason": "", "out_of_memory": False},
            "kept": {},
            "exited_early": False,
            **unused,
            "started_s": None,
            "ended_s": 2.5,
        },
    ]
    assert state == {
        "run": "r-7",
        "label": "Cell In[5]",
        "world_size": 2,
        "gpus": False,
        "strategy": "ddp",
        "remark": "",
        "ended": True,
        "limit_s": None,
        "hung": False,
        "cause": 0,
        "ok": False,
        "elapsed_s": 3.0,
        "log_directory": "",
        "line_count": 1,
        "peak_rss_bytes": 0,
        "peak_gpu_memory_bytes": None,
        "stall": None,
        "notes": [{"rank": None, "text": "utils.py changed"}, {"rank": 0, "text": "loss is nan at step 1"}],
        "lines": [{"rank": 0, "stream": "stdout", "text": "hello", "skipped": 0}],
    }


# ---------------------------------------------------------------------------------------------------- output


def test_pieces_of_lines_of_two_ranks_do_not_mix() -> None:
    record = a_record()
    for one, other in zip("hello\nagain\n", "world\nthere\n", strict=True):
        record.apply(wrote(one, 0))
        record.apply(wrote(other, 1))
    assert texts(record) == ["0: hello", "1: world", "0: again", "1: there"]


def test_the_streams_of_one_rank_do_not_mix() -> None:
    record = a_record(wrote("out"), wrote("err\n", stream="stderr"), wrote("put\n"))
    assert [(line.stream, line.text) for line in record.lines_since()] == [("stderr", "err"), ("stdout", "output")]


def test_a_line_without_its_newline_is_partial_until_the_run_ends() -> None:
    record = a_record(wrote("no newline"))
    assert (texts(record), record.ranks[0].last_line) == ([], "no newline")
    assert [line.text for line in record.partial_lines()] == ["no newline"]
    record.apply(m.Ended(run="r-7", at_s=12.0))
    assert texts(record) == ["0: no newline"]


def test_memory_holds_the_first_and_last_lines_and_counts_the_rest() -> None:
    record = a_record(*(wrote("".join(f"{n}\n" for n in range(k, k + 100))) for k in range(0, 20_000, 100)))
    lines = texts(record)
    assert lines[199:202] == ["0: 199", "(18800)", "0: 19000"]
    assert (lines[0], lines[-1]) == ("0: 0", "0: 19999")
    assert (len(lines), record.line_count) == (1201, 20_000)


def test_lines_that_the_agent_left_out_are_counted_where_they_were() -> None:
    record = a_record(wrote("a\nhalf"), wrote("b\n", skipped=500))
    assert texts(record) == ["0: a", "0: half", "(500)", "0: b"]
    assert record.line_count == 503


def test_lines_since_gives_only_what_is_new() -> None:
    record = a_record(wrote("a\nb\n"))
    seen = record.entry_count
    record.apply(wrote("c\n"))
    assert [line.text for line in record.lines_since(seen)] == ["c"]


def test_lines_since_says_how_many_were_lost_in_between() -> None:
    record = a_record(wrote("a\n" * 1500))
    seen = record.entry_count
    record.apply(wrote("b\n" * 1200))
    lines = record.lines_since(seen)
    assert (lines[0].skipped, len(lines)) == (200, 1001)


def test_a_huge_line_in_pieces_is_cut_and_says_by_how_much() -> None:
    record = a_record()
    for _ in range(100):
        record.apply(wrote("x" * 100_000))
    record.apply(wrote("\n"))
    (line,) = record.lines_since()
    assert line.text == "x" * LINE_CHARACTERS + "... (9,996,000 more characters in the log)"


def test_a_huge_line_in_one_piece_is_cut_too() -> None:
    (line,) = a_record(wrote("x" * 10_000 + "\n")).lines_since()
    assert line.text.endswith("... (6,000 more characters in the log)")


def test_colours_and_other_codes_are_stripped_also_when_cut_in_two() -> None:
    record = a_record(wrote("\x1b[31mred\x1b[0m \x1b]0;title\x07plain \x1b[3"), wrote("2mgreen\x1b[0m\n"))
    assert texts(record) == ["0: red plain green"]


def test_a_code_that_never_ends_does_not_swallow_the_next_line() -> None:
    assert texts(a_record(wrote("a\x1b]0;b\nc\n"))) == ["0: a", "0: c"]


def test_control_characters_are_made_visible() -> None:
    assert texts(a_record(wrote("a\x00b\x07c\td\x9b\n"))) == ["0: a\\x00b\\x07c\td\\x9b"]


def test_a_carriage_return_starts_the_line_anew() -> None:
    assert texts(a_record(wrote("step 1\rstep 2"), wrote("\rstep 3\n"))) == ["0: step 3"]


def test_a_windows_newline_is_a_newline() -> None:
    assert texts(a_record(wrote("one\r"), wrote("\ntwo\r\n"))) == ["0: one", "0: two"]


def test_folding_two_thousand_lines_is_quick() -> None:
    event = wrote("".join(f"epoch 1 step {n} loss 0.523{n}\n" for n in range(2000)))
    took_s = min(_seconds_to_fold(event) for _ in range(5))
    assert took_s < 0.010 * 3  # the budget is 10 ms; a busy box gets some slack


def test_folding_a_flood_of_bars_is_quick() -> None:
    event = wrote("".join(f"\rtrain:  45%|####    | {n}/20000 [00:01<00:01, 33.1it/s]" for n in range(20_000)))
    assert min(_seconds_to_fold(event) for _ in range(3)) < 0.050


def test_a_long_line_of_blanks_is_not_slow_to_reject_as_a_bar() -> None:
    event = wrote("\r" + " " * 900 + "%|x [\r" + "1" * 900 + " [\n")
    assert _seconds_to_fold(event) < 0.5


def _seconds_to_fold(event: m.Wrote) -> float:
    record = a_record()
    began_s = time.process_time()
    record.apply(event)
    return time.process_time() - began_s


# ---------------------------------------------------------------------------------------------------- progress


def test_reported_progress_gets_its_rate_from_the_times() -> None:
    record = a_record(
        *(m.Progressed(run="r-7", rank=0, label="epoch", step=n, total=100, at_s=n / 4) for n in range(10))
    )
    (bar,) = record.ranks[0].progress
    assert (bar.label, bar.step, bar.total) == ("epoch", 9, 100)
    assert bar.rate == pytest.approx(4.0)


def moved(label: str, step: int, total: int) -> m.Progressed:
    return m.Progressed(run="r-7", rank=0, label=label, step=step, total=total, at_s=1.0)


def labels(record: RunRecord) -> list[tuple[str, float]]:
    return [(bar.label, bar.step) for bar in record.ranks[0].progress]


def test_a_loop_inside_a_loop_is_shown_under_it_until_the_outer_one_moves() -> None:
    record = a_record(moved("epoch", 0, 2), moved("batch", 1, 3), moved("batch", 3, 3))
    assert labels(record) == [("epoch", 0), ("batch", 3)]
    record.apply(moved("epoch", 1, 2))
    assert labels(record) == [("epoch", 1)]


def test_a_loop_after_a_finished_loop_takes_its_place() -> None:
    assert labels(a_record(moved("train", 3, 3), moved("test", 1, 3))) == [("test", 1)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "label:  45%|####    | 45/100 [00:01<00:01, 33.1it/s, loss=0.3, acc=1]",
            Progress(label="label", step=45, total=100, rate=33.1, detail="loss=0.3, acc=1"),
        ),
        (" 45%|████▌     | 45/100 [00:01<00:01, 33.1it/s]", Progress(label="", step=45, total=100, rate=33.1)),
        ("45it [00:01, 33.1it/s]", Progress(label="", step=45, total=None, rate=33.1)),
        ("a: b: 0it [00:00, ?it/s]", Progress(label="a: b", step=0, total=None)),
        ("epoch 2: 12 samples [01:00:00, 2.50s/ samples]",
         Progress(label="epoch 2", step=12, total=None, rate=0.4, unit="samples")),
        (
            " 40%|####      | 1.20k/3.00k [00:00<00:00, 629MB/s]",
            Progress(label="", step=1200, total=3000, rate=629e6, unit="B"),
        ),
        ("Loss 0.3:  50%|#####     | 1.5/3 [00:00<?, ?it/s]", Progress(label="Loss 0.3", step=1.5, total=3)),
        (" 51%|5| 51/100 [00:00<00:00, 3", Progress(label="", step=51, total=100)),
        ("train:  50%|#####     |", Progress(label="train", step=50, total=100)),
        ("100%|██████████| 10/10 [00:10<00:00,  1.00s/it]", Progress(label="", step=10, total=10, rate=1.0)),
    ],
)  # fmt: skip
def test_tqdm_is_recognised(text: str, expected: Progress) -> None:
    assert parse_bar(text) == expected


@pytest.mark.parametrize("text", ["accuracy 45%|50%", "[00:01, x]", "see [1] and 5 [2]", "", "loss 0.3", "100% done"])
def test_other_text_is_not_taken_for_a_bar(text: str) -> None:
    assert parse_bar(text) is None


def test_a_bar_is_progress_and_never_a_line() -> None:
    record = a_record(
        wrote("start\n"),
        wrote("\rtrain:  50%|##| 1/2 [00:00<00:00, 3.00it/s]", stream="stderr"),
        wrote("\rtrain: 100%|####| 2/2 [00:00<00:00, 3.00it/s]\n", stream="stderr"),
        wrote("end\n"),
        m.Ended(run="r-7", at_s=13.0),
    )
    assert texts(record) == ["0: start", "0: end"]
    assert labels(record) == [("train", 2)]


def test_a_bar_that_arrives_in_pieces_is_a_bar() -> None:
    record = a_record(*(wrote(character) for character in "\rtrain:  50%|##| 1/2 [00:00<00:00, 3.00it/s]\n"))
    assert (texts(record), labels(record)) == ([], [("train", 1)])


def test_a_bar_that_no_carriage_return_started_is_output() -> None:
    record = a_record(wrote("train:  50%|##| 1/2 [00:00<00:00, 3.00it/s]\n"))
    assert (len(texts(record)), labels(record)) == (1, [])


class _Terminal(io.StringIO):
    """Gives what tqdm wrote, in pieces of a size."""

    def pieces(self, size: int) -> Iterator[m.Wrote]:
        text = self.getvalue()
        return (wrote(text[k : k + size], stream="stderr") for k in range(0, len(text), size))


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize("leave", [True, False])
def test_nested_bars_of_tqdm_leave_no_lines(size: int, leave: bool) -> None:
    tqdm = pytest.importorskip("tqdm").tqdm
    terminal = _Terminal()
    for _ in tqdm(range(2), desc="epoch", file=terminal, mininterval=0):
        for _ in tqdm(range(3), desc="batch", leave=leave, position=1, file=terminal, mininterval=0):
            pass
    record = a_record(*terminal.pieces(size))
    assert texts(record) == []
    assert ("epoch", 2) in labels(record)


def test_nested_bars_of_tqdm_are_seen_while_they_run() -> None:
    tqdm = pytest.importorskip("tqdm").tqdm
    terminal, seen = _Terminal(), []
    for _ in tqdm(range(2), desc="epoch", file=terminal, mininterval=0):
        for _ in tqdm(range(3), desc="batch", leave=False, position=1, file=terminal, mininterval=0):
            seen.append(labels(a_record(*terminal.pieces(10_000))))
    assert seen[1] == [("epoch", 0), ("batch", 1)]
    assert seen[-1] == [("epoch", 1), ("batch", 2)]


@pytest.mark.parametrize("size", [1, 10_000])
def test_lines_written_through_tqdm_stay_lines(size: int) -> None:
    tqdm = pytest.importorskip("tqdm").tqdm
    terminal = _Terminal()
    for n in tqdm(range(3), file=terminal, mininterval=0, colour="green"):
        tqdm.write(f"line {n}", file=terminal)
    record = a_record(*terminal.pieces(size))
    assert texts(record) == ["0: line 0", "0: line 1", "0: line 2"]
    assert labels(record) == [("", 3)]


def test_any_text_in_any_pieces_is_folded_without_an_exception() -> None:
    text = "a\x1b[A\r 5%|#| 1/2 [0:1<?, ?\x1b[2K\n\x1b]0;x\r\r\n\x1b[\x1b(B\x1b[999999A\x00\ufffd<b>\n" * 3
    for size in range(1, 40):
        record = a_record(*(wrote(text[k : k + size]) for k in range(0, len(text), size)), m.Ended(run="r-7", at_s=1.0))
        assert all("\x1b" not in line.text and "\n" not in line.text for line in record.lines_since())


# ---------------------------------------------------------------------------------------------------- what views get


def test_the_golden_state_is_what_javascript_is_tested_with() -> None:
    assert golden_run.golden_text() == golden_run.FILE.read_text(encoding="utf-8")
    assert golden_run.failures_text() == golden_run.FAILURES_FILE.read_text(encoding="utf-8")


def sampled(*, rss: int, gpu: int | None = None) -> m.Sampled:
    return m.Sampled(
        run="r-7",
        rank=0,
        rss_bytes=rss,
        cpu_percent=50.0,
        gpu_memory_bytes=gpu,
        gpu_memory_total_bytes=None,
        gpu_percent=None,
        at_s=11.0,
    )


def test_peaks_are_the_most_that_was_seen() -> None:
    record = a_record(started(0), sampled(rss=30, gpu=7), sampled(rss=10, gpu=2))
    rank = record.ranks[0]
    assert (rank.rss_bytes, rank.peak_rss_bytes, rank.gpu_memory_bytes, rank.peak_gpu_memory_bytes) == (10, 30, 2, 7)
    assert (record.peak_rss_bytes, record.peak_gpu_memory_bytes) == (30, 7)


def test_the_system_knows_the_peak_of_a_rank_that_died_better_than_samples() -> None:
    record = a_record(started(0), sampled(rss=30))
    record.apply(m.Exited(run="r-7", rank=0, pid=1, exit_code=-9, asked=False, peak_rss_bytes=99, at_s=12.0))
    assert (record.peak_rss_bytes, record.peak_gpu_memory_bytes) == (99, None)


def test_a_stall_that_was_over_or_did_no_harm_is_forgotten() -> None:
    stalled = m.Stalled(run="r-7", text="rank 0 sleeps", places=(), at_s=11.0)
    record = a_record(started(0), stalled, ranks=1)
    assert record.stall == stalled
    record.apply(m.Moved(run="r-7", at_s=12.0))
    assert record.stall is None
    record = a_record(started(0), stalled, returned(0), m.Ended(run="r-7", at_s=13.0), ranks=1)
    assert record.stall is None


def test_a_stall_that_a_run_was_stopped_in_is_kept() -> None:
    stalled = m.Stalled(run="r-7", text="rank 0 sleeps", places=(), at_s=11.0)
    stopped = m.Interrupted(run="r-7", rank=0, frames=(), at_s=12.0)
    assert a_record(started(0), stalled, stopped, m.Ended(run="r-7", at_s=13.0), ranks=1).stall == stalled


def displayed(text: str, *, display_id: str = "", update: bool = False) -> m.Displayed:
    data = {"text/plain": text}
    return m.Displayed(run="r-7", rank=0, data=data, metadata={}, display_id=display_id, update=update, at_s=11.0)


def shown(record: RunRecord) -> list[str]:
    return [display.data["text/plain"] for display in record.ranks[0].displays.shown]


def test_an_updated_display_stays_in_its_place() -> None:
    record = a_record(
        displayed("a", display_id="x"), displayed("b"), displayed("c", display_id="x"),
        displayed("new", display_id="x", update=True), displayed("of nothing", display_id="y", update=True),
    )  # fmt: skip
    assert shown(record) == ["new", "b", "new"]


def cleared(number: int, *, wait: bool = False) -> m.Cleared:
    return m.Cleared(run="r-7", rank=0, number=number, wait=wait, at_s=11.0)


def code(number: int, *, wait: bool = False) -> str:
    return f"\x1b]distrib-clear;{number}{';wait' if wait else ''}\x07"


def kept(record: RunRecord) -> tuple[list[str], list[str]]:
    return shown(record), [text for text in texts(record) if text != "0: "]


def test_clearing_takes_displays_and_lines_of_its_rank() -> None:
    record = a_record(wrote("other\n", 1), wrote("line\npart"), displayed("a"), cleared(1), displayed("b"))
    record.apply(wrote(code(1) + "new\n"))
    assert kept(record) == (["b"], ["1: other", "0: new"])
    assert (record.line_count, record.ranks[0].last_line) == (3, "new")


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_the_last_of_many_clearings_counts_wherever_they_are_cut(size: int) -> None:
    text = "".join(f"old {n}\n{code(n, wait=n % 2 == 0)}" for n in range(1, 6)) + "new\n"
    record = a_record(*(wrote(text[k : k + size]) for k in range(0, len(text), size)))
    assert kept(record)[1] == ["0: new"]


def test_with_wait_all_stays_until_something_new_is_printed() -> None:
    record = a_record(wrote("old\n"), displayed("a"), cleared(1, wait=True), wrote(code(1, wait=True)))
    assert kept(record) == (["a"], ["0: old"])
    record.apply(wrote("new\n"))
    assert kept(record) == ([], ["0: new"])
    record.apply(displayed("b"))
    assert kept(record) == (["b"], ["0: new"])


@pytest.mark.parametrize("late", [False, True])
def test_with_wait_all_stays_until_something_new_is_displayed(*, late: bool) -> None:
    events = (
        [displayed("b"), wrote(code(1, wait=True) + "x\n")] if late else [wrote(code(1, wait=True)), displayed("b")]
    )
    record = a_record(wrote("old\n"), displayed("a"), cleared(1, wait=True), *events)
    assert kept(record) == (["b"], ["0: x"] if late else [])


@pytest.mark.parametrize(
    "pattern", ["\x1b[{}m", "\x1b[38;5;{}m", "\x1b[38;2;{0};{0};{0}m", "\x1b[{}A", "\x1b]distrib-clear;{}\x07"]
)
def test_codes_with_thousands_of_digits_are_only_text(pattern: str) -> None:
    """Python does not read such numbers. Its error, by which the notebook lost all of its ranks, came from anything
    that a rank printed, such as a text of its data set."""
    record = a_record(wrote("old\n"), wrote(f"{pattern.format('9' * 5000)}new\n"))
    assert kept(record)[1] == ["0: old", "0: new"]


@pytest.mark.parametrize("numbers", ["1e999/1e999", "1/1e999", "1e999/2", "1/1e300"])
def test_a_text_with_numbers_beyond_all_bounds_is_no_bar(numbers: str) -> None:
    """The view of the run failed to draw it, and the cell ended with an error."""
    record = a_record(wrote(f"\r 50%|##### | {numbers} [00:01<00:01, 1.00it/s]"))
    assert not record.ranks[0].progress
    assert numbers in as_text(record, 20.0)


@pytest.mark.parametrize("rate", ["1e999it/s", "1e-320it/s", "1e300s/it"])
def test_a_bar_with_an_impossible_rate_has_none(rate: str) -> None:
    record = a_record(wrote(f"\r 50%|##### | 1/2 [00:01<00:01, {rate}]"))
    [bar] = record.ranks[0].progress
    assert (bar.step, bar.total, bar.rate) == (1, 2, None)
    assert "1/2" in as_text(record, 20.0)


def test_clearing_a_flood_leaves_no_gap() -> None:
    record = a_record(wrote("".join(f"{n}\n" for n in range(5000))), wrote("stays\n", 1), wrote(code(1) + "new\n"))
    assert kept(record)[1] == ["1: stays", "0: new"]


def test_who_has_read_lines_before_finds_that_they_are_cleared() -> None:
    record = a_record(wrote("old\n" * 5))
    seen = record.entry_count
    record.apply(wrote(code(1) + "new\n"))
    assert [(line.text, line.cleared) for line in record.lines_since(seen)] == [("", True), ("new", False)]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_the_colours_of_a_line_are_spans_and_hold_until_they_end(size: int) -> None:
    text = "a \x1b[1;31mred\nstill\x1b[0m not\n\x1b[38;5;208mcube\x1b[48;2;1;2;3m both\x1b[39;49m\rover\n\ufdd0x\n"
    record = a_record(*(wrote(text[k : k + size]) for k in range(0, len(text), size)))
    assert [(line.text, line.spans) for line in record.lines_since()] == [
        ("a red", ((2, 5, "B f1"),)),
        ("still not", ((0, 5, "B f1"),)),
        ("over", ()),
        ("\ufffdx", ()),
    ]


def test_a_long_line_loses_its_colours_but_not_the_end_of_one() -> None:
    record = a_record(wrote("\x1b[31m" + "x" * 5000 + "\x1b[0m\nplain\n"))
    long, plain = record.lines_since()
    assert (long.text[:2], long.spans, plain.spans) == ("xx", (), ())


def test_many_or_large_displays_push_the_oldest_out() -> None:
    record = a_record(*(displayed(str(n)) for n in range(KEPT + 5)))
    assert (len(shown(record)), shown(record)[0], record.ranks[0].displays.skipped) == (KEPT, "5", 5)
    record.apply(displayed("x" * KEPT_BYTES))
    assert (len(shown(record)), record.ranks[0].displays.skipped) == (1, KEPT + 5)


def test_every_event_of_a_run_is_named_where_records_fold_them() -> None:
    """Type checkers cannot say so, since the events have a base and no list."""
    folded = "".join(inspect.getsource(each) for each in (run_record, rank_record))
    events = {cls for cls in m.shared.CLASSES.values() if issubclass(cls, m.RunEvent)}

    assert {cls.__name__ for cls in events if not re.search(rf"case .*\bm\.{cls.__name__}\(\)", folded)} == set()
    assert len(events) > 20


def test_reports_that_a_restart_computes_again_are_lost_and_those_before_an_earlier_restart_stay_so() -> None:
    record = RunRecord(run="r", label="x", ranks=range(1), world_size=1)

    def measured(*steps: int, at_s: float) -> None:
        record.apply(m.Started(run="r", rank=0, pid=1, device="cpu", at_s=at_s))
        for step in steps:
            record.apply(m.Measured(run="r", rank=0, step=step, values={"loss": at_s}, at_s=at_s + step / 10))

    def restarted(attempt: int, at_s: float) -> None:
        record.apply(m.Restarted(run="r", attempt=attempt, max_restarts=2, cause="rank 0 was lost", at_s=at_s))

    measured(0, 1, 2, 3, at_s=1.0)
    restarted(1, at_s=2.0)
    measured(2, 3, 4, at_s=3.0)
    restarted(2, at_s=4.0)
    measured(4, 5, at_s=5.0)

    kept = [(sample.step, sample.values["loss"]) for sample in record.ranks[0].history if not sample.lost]
    assert kept == [(0, 1.0), (1, 1.0), (2, 3.0), (3, 3.0), (4, 5.0), (5, 5.0)]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("abc\b\bX", "aXc"),
        ("abc\b \b", "ab "),
        ("10%\b\b\b20%\b\b\b100%", "100%"),
        ("|\b/\b-\b\\\bdone", "done"),
        ("\b\bx", "x"),
        ("ab\rX\bY", "Y"),
        ("\x1b[31mab\x1b[0mc\b\bZ", "aZc"),
        ("a\b\r\nb", "a\nb"),
        ("first\nab\bc\nlast", "first\nac\nlast"),
        (f"{'x' * LINE_CHARACTERS}yy\b\b", "x" * LINE_CHARACTERS),
    ],
)
def test_backspaces_move_the_cursor_as_in_a_terminal(text: str, shown: str) -> None:
    assert without_codes(text) == shown
    stream = Stream()
    single = [line for character in f"{text}\n" for line in stream.feed(character).lines]
    assert "\n".join(single) == shown
