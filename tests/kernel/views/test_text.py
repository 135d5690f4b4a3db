"""The view of a run: record in, text and markup out."""

from __future__ import annotations

import pytest

from jupyter_distrib.kernel.analysis.failures import first_trouble
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.kernel.views.html import as_html
from jupyter_distrib.kernel.views.text import amount, as_text, clock, header, is_worth_showing, stream_lines
from jupyter_distrib.wire import messages as m


def a_record(*events: m.RunEvent, ranks: int = 2, world_size: int | None = None, strategy: str = "ddp") -> RunRecord:
    record = RunRecord(
        run="r-7", label="Cell In[5]", ranks=range(ranks), world_size=world_size or ranks, strategy=strategy
    )
    for rank in range(ranks):
        record.apply(m.Started(run="r-7", rank=rank, pid=100 + rank, device="cpu", at_s=1.0))
    for event in events:
        record.apply(event)
    return record


def ended(*events: m.RunEvent, ranks: int = 2) -> RunRecord:
    returns = [m.Returned(run="r-7", rank=rank, value=None, at_s=2.0) for rank in range(ranks)]
    return a_record(*returns, *events, m.Ended(run="r-7", at_s=3.0), ranks=ranks)


def wrote(text: str, rank: int = 0, stream: str = "stdout", skipped: int = 0) -> m.Wrote:
    return m.Wrote(run="r-7", rank=rank, stream=stream, text=text, skipped_lines=skipped)


def moved(rank: int, step: int, at_s: float = 1.0, total: int | None = 100) -> m.Progressed:
    return m.Progressed(run="r-7", rank=rank, label="epoch", step=step, total=total, at_s=at_s)


def measured(rank: int, **values: float) -> m.Measured:
    return m.Measured(run="r-7", rank=rank, step=1, values=values, at_s=2.0)


def body(record: RunRecord, elapsed_s: float = 0.3) -> list[str]:
    return as_text(record, elapsed_s).splitlines()[1:]


# ---------------------------------------------------------------------------------------------------- when and how much


def test_a_run_that_only_ended_well_shows_nothing() -> None:
    assert (as_text(ended(), 100.0), as_html(ended(), 100.0)) == ("", "")


@pytest.mark.parametrize(("elapsed_s", "shown"), [(0.5, False), (1.5, True)])
def test_a_silent_run_is_shown_once_it_takes_a_while(elapsed_s: float, shown: bool) -> None:
    assert is_worth_showing(a_record(), elapsed_s) is shown


@pytest.mark.parametrize(
    "event", [wrote("x\n"), moved(0, 1), measured(0, loss=1.0), m.Noted(run="r-7", rank=None, text="utils.py changed")]
)
def test_a_run_with_something_to_tell_is_shown(event: m.RunEvent) -> None:
    assert is_worth_showing(ended(event), 0.1)


def test_a_line_that_has_not_ended_is_seen_while_the_run_goes_on() -> None:
    assert body(a_record(wrote("working"))) == ["[0] working"]


def test_the_header_of_a_short_run_is_short() -> None:
    assert header(a_record(strategy="none"), 0.31, "local") == "2 ranks · 0.3 s"


def test_the_header_of_a_longer_run_says_all() -> None:
    assert header(a_record(), 41.0, "local") == "2 ranks · ddp · local · cpu · 0:41"


def test_the_header_names_the_ranks_of_a_part_of_the_pool() -> None:
    assert header(a_record(world_size=4), 0.3) == "ranks 0-1 of 4 · ddp · 0.3 s"


def test_notes_are_shown_once_with_their_ranks() -> None:
    notes = (m.Noted(run="r-7", rank=rank, text="utils.py was imported again") for rank in (0, 1))
    assert body(ended(*notes)) == ["· ranks 0-1: utils.py was imported again"]


def test_ranks_that_left_early_are_reported() -> None:
    record = ended(m.Returned(run="r-7", rank=1, value=None, exited_early=True))
    assert body(record) == ["· rank 1: left the cell early with sys.exit()"]


# ---------------------------------------------------------------------------------------------------- output


def test_lines_name_their_rank_and_equal_lines_are_folded() -> None:
    record = ended(wrote("start\nloss 0.52\nsaved\n", 0), wrote("start\nloss 0.53\nsaved\n", 1))
    assert body(record) == ["[0-1] start", "[0] loss 0.52", "[1] loss 0.53", "[0-1] saved"]


def test_almost_equal_lines_are_not_folded() -> None:
    assert body(ended(wrote("a\n", 0), wrote("a \n", 1))) == ["[0] a", "[1] a "]


def test_a_line_that_one_rank_repeats_is_not_folded() -> None:
    assert body(ended(wrote("a\na\n", 0))) == ["[0] a", "[0] a"]


def test_folding_keeps_the_order_of_every_rank() -> None:
    texts = {0: "abacadbbc", 1: "bacabdcab", 2: "ccabbaadc"}
    record = ended(*(wrote("\n".join(text) + "\n", rank) for rank, text in texts.items()), ranks=3)
    for rank, text in texts.items():
        mine = [line[-1] for line in body(record) if rank in _ranks_of(line)]
        assert "".join(mine) == text


def test_a_line_that_folding_has_moved_down_is_still_in_reach() -> None:
    own, later = ([f"{name}{n}" for n in range(count)] for name, count in (("own", 10), ("later", 40)))
    events = (wrote("same\n", 1), wrote("\n".join([*own, "same"]) + "\n", 2), wrote("\n".join(later) + "\n", 1))
    before = [*(f"[2] {text}" for text in own), "[1-2] same", *(f"[1] {text}" for text in later)]
    assert body(ended(*events, ranks=3)) == before
    rest = wrote("".join(f"more{n}\n" for n in range(20)), 1)
    assert "[0-2] same" in body(ended(*events, rest, wrote("same\n", 0), ranks=3))


def _ranks_of(line: str) -> set[int]:
    ranks: set[int] = set()
    for part in line[1 : line.index("]")].split(","):
        first, _, last = part.partition("-")
        ranks |= set(range(int(first), int(last or first) + 1))
    return ranks


def test_standard_error_is_marked_and_not_folded_with_output() -> None:
    assert body(ended(wrote("a\n", 0), wrote("a\n", 1, "stderr"))) == ["[0] a", "[1!] a"]


def test_the_middle_of_long_output_is_left_out_with_a_sentence() -> None:
    lines = body(ended(*(wrote("".join(f"{n}\n" for n in range(k, k + 100))) for k in range(0, 20_000, 100))))
    assert (lines[59], lines[61]) == ("[0] 59", "[0] 19940")
    assert lines[60] == "... 19,880 lines not shown here; %distributed_logs r-7 shows all"
    assert len(lines) == 121


def test_after_a_flood_the_first_lines_of_each_rank_and_the_last_ones_are_there() -> None:
    floods = [
        wrote("".join(f"{rank} says {n}\n" for n in range(k, k + 100)), rank)
        for rank in range(4)
        for k in range(0, 5000, 100)
    ]
    lines = body(ended(*floods, ranks=4))
    gaps = [index for index, line in enumerate(lines) if line.startswith("...")]

    assert [lines[index] for index in gaps] == ["... 19,820 lines not shown here; %distributed_logs r-7 shows all"]
    before = lines[: gaps[0]]
    assert [sum(line.startswith(f"[{rank}] {rank} says") for line in before) for rank in range(4)] == [60, 20, 20, 20]
    assert (before[-1], lines[-1]) == ("[3] 3 says 19", "[3] 3 says 4999")
    assert len(lines[gaps[0] + 1 :]) == 60


def test_every_line_is_either_shown_or_counted() -> None:
    events = (wrote(f"{n}\nsame\n", n % 3, skipped=n % 7) for n in range(2000))
    shown = counted = 0
    for line in body(ended(*events, ranks=3)):
        if line.startswith("..."):
            counted += int(line.split()[1].replace(",", ""))
        else:
            shown += len(_ranks_of(line))
    assert shown + counted == 4000 + sum(n % 7 for n in range(2000))


def test_lines_that_the_agent_left_out_are_counted_in_their_place() -> None:
    lines = body(ended(wrote("a\n"), wrote("b\n", skipped=500)))
    assert lines == ["[0] a", "... 500 lines of rank 0 not shown here; %distributed_logs r-7 shows all", "[0] b"]


def test_a_running_view_is_short() -> None:
    assert len(body(a_record(wrote("x\n" * 5000)), 0.5)) == 41


def test_very_long_lines_are_cut() -> None:
    assert len(as_text(ended(wrote("x" * 100_000 + "\n")), 0.3)) < 1200


def test_a_terminal_gets_only_new_lines_with_their_ranks() -> None:
    record = a_record(wrote("a\nb\npart", 0))
    first, since = stream_lines(record, 0)
    record.apply(wrote("ial\n", 0))
    record.apply(wrote("c\n", 1))
    assert (first, stream_lines(record, since)[0]) == (["[0] a", "[0] b"], ["[0] partial", "[1] c"])
    assert stream_lines(record, stream_lines(record, since)[1])[0] == []


# ---------------------------------------------------------------------------------------------------- status lines


def test_progress_and_metrics_make_a_line_per_rank() -> None:
    record = a_record(moved(0, 1, 1.0), moved(0, 34, 2.0), moved(1, 50), measured(0, loss=0.31234))
    assert body(record) == [
        "rank 0  running  epoch 34/100 ▓▓░░░░░░ 33 it/s, 0:02 left  loss 0.3123",
        "rank 1  running  epoch 50/100 ▓▓▓▓░░░░",
    ]


def test_slow_steps_are_reported_in_seconds_a_step() -> None:
    assert "4 s/it" in body(a_record(moved(0, 1, 1.0), moved(0, 2, 5.0)))[0]


def test_a_loop_without_an_end_has_no_bar() -> None:
    assert body(a_record(moved(0, 12_345, total=None)))[0] == "rank 0  running  epoch 12.3k"


def test_the_bar_of_tqdm_keeps_its_postfix() -> None:
    text = "\rtrain:  45%|####    | 45/100 [00:01<00:01, 33.1it/s, loss=0.3]"
    assert body(a_record(wrote(text, 0, "stderr")))[0].endswith("45/100 ▓▓▓░░░░░ 33.1 it/s, 0:01 left  loss=0.3")


def test_the_final_progress_stays_without_a_rate() -> None:
    assert body(ended(moved(0, 1, 1.0), moved(0, 100, 2.0)))[0] == "rank 0  done  epoch 100/100 ▓▓▓▓▓▓▓▓"


def test_a_failure_is_reported_and_ranks_that_fell_over_it_are_not_blamed() -> None:
    peer = m.Failure(type_name="RuntimeError", message="[/gloo/transport/tcp/pair.cc:547] Connection closed by peer")
    record = a_record(
        m.Failed(run="r-7", rank=0, failure=m.Failure(type_name="KeyError", message="'lr'"), at_s=2.0),
        m.Failed(run="r-7", rank=1, failure=peer, at_s=2.1),
    )
    assert body(record) == ["rank 0  failed  KeyError: 'lr'", "rank 1  failed  stopped because of rank 0"]


def test_a_rank_that_was_stopped_because_of_another_says_so() -> None:
    failed = m.Failed(run="r-7", rank=1, failure=m.Failure(type_name="KeyError", message="'lr'"), at_s=2.0)
    record = a_record(failed, m.Interrupted(run="r-7", rank=0, frames=(), at_s=2.1))
    assert body(record)[1] == "rank 0  interrupted  stopped because of rank 1"


def test_a_message_of_many_lines_is_one_in_the_table() -> None:
    failure = m.Failure(type_name="RuntimeError", message="\n".join(f"line {n}" for n in range(60)))
    record = a_record(m.Failed(run="r-7", rank=0, failure=failure, at_s=2.0), ranks=1)
    assert body(record) == ["rank 0  failed  RuntimeError: line 0 ... (59 more lines)"]


def test_a_death_is_reported() -> None:
    record = a_record(m.Exited(run="r-7", rank=1, pid=1, exit_code=-11, asked=False, at_s=2.0))
    assert body(record)[0].endswith("crashed with SIGSEGV (segmentation fault)")


def test_an_interrupted_run_is_reported_also_when_it_printed_nothing() -> None:
    record = a_record(m.Interrupted(run="r-7", rank=0, frames=(), at_s=2.0), m.Ended(run="r-7", at_s=2.0))
    assert body(record)[0] == "rank 0  interrupted"


def test_many_ranks_in_the_same_state_share_a_line() -> None:
    record = a_record(
        *(moved(rank, 45 + rank % 3) for rank in range(64)),
        *(measured(rank, loss=0.3 + rank / 100, epoch=1) for rank in range(64)),
        m.Exited(run="r-7", rank=5, pid=1, exit_code=-9, asked=False, at_s=2.0),
        ranks=64,
    )
    assert body(record) == [
        "rank 5           lost     epoch 47/100 ▓▓▓░░░░░  loss 0.35  epoch 1  was killed by SIGKILL",
        "ranks 0-4, 6-63  running  epoch 45-47/100 ▓▓▓░░░░░  loss 0.3 to 0.93  epoch 1",
    ]


def test_a_nan_among_many_ranks_is_named() -> None:
    record = a_record(*(measured(rank, loss=float("nan") if rank == 7 else 0.5) for rank in range(9)), ranks=9)
    assert body(record)[1].endswith("loss 0.5 (nan from step 1 on rank 7)")


def test_a_nan_of_one_rank_is_shown() -> None:
    assert body(a_record(measured(0, loss=float("nan"))))[1].endswith("loss nan from step 1")


# ---------------------------------------------------------------------------------------------------- markup, numbers


def test_the_markup_escapes_everything_and_needs_no_script() -> None:
    evil = "<script>alert(1)</script>"
    record = a_record(
        wrote(f"{evil}\n"),
        m.Noted(run="r-7", rank=0, text=evil),
        m.Progressed(run="r-7", rank=0, label=evil, step=1, total=2, at_s=1.0),
        m.Measured(run="r-7", rank=0, step=1, values={evil: 1.0}, at_s=1.0),
        m.Failed(run="r-7", rank=1, failure=m.Failure(type_name=evil, message=evil), at_s=2.0),
    )
    html = as_html(record, 1.0, evil)
    assert ("<script" in html, "<style" in html, ">[0] &lt;script&gt;" in html) == (False, False, True)


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (41, "0:41"), (725, "12:05"), (3723, "1:02:03")])
def test_the_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"), [(45, "45"), (1.5, "1.5"), (9999, "9999"), (12_345, "12.3k"), (3e6, "3M"), (629e6, "629M")]
)
def test_amounts(number: float, text: str) -> None:
    assert amount(number) == text


def test_ranks_that_failed_alike_are_named_together_and_others_are_not() -> None:
    record = RunRecord(run="r-7", label="Cell In[5]", ranks=range(4), world_size=4)
    for rank in range(4):
        record.apply(m.Started(run="r-7", rank=rank, pid=1, device="cpu", at_s=1.0))
        message = "'lr'" if rank < 3 else "'other'"
        failure = m.Failure(type_name="KeyError", message=message)
        record.apply(m.Failed(run="r-7", rank=rank, failure=failure, at_s=2.0 + rank))
    assert first_trouble(record, 0, 100) == "ranks 0-2: KeyError: 'lr'"
    assert first_trouble(record, 3, 100) == "rank 3: KeyError: 'other'"
