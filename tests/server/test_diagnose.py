"""`diagnose`: what is known of each rank in, sentences out."""

from __future__ import annotations

import pytest

from jupyter_distrib.server.diagnose import diagnose, is_suspicious
from jupyter_distrib.server.stalls import Stalls
from jupyter_distrib.wire import messages as m

CELL = """import torch.distributed as dist
for batch in data:
    step(batch)
    if rank == 0:
        save()
        dist.barrier()
    else:
        other()
dist.all_reduce(x)
"""


def seen(
    rank: int,
    *,
    line: int | None = 9,
    call: str = "",
    function: str = "",
    unmoved_s: float = 6.0,
    idle_s: float | None = None,
    groups: tuple[m.GroupSighting, ...] | None = None,
) -> m.ProbeAnswer:
    return m.ProbeAnswer(
        run="r",
        rank=rank,
        line=line,
        function=function,
        call=call,
        unmoved_s=unmoved_s,
        idle_s=unmoved_s if idle_s is None else idle_s,
        groups=groups,
    )


def group(
    entered: int,
    number: int = 0,
    op: str = "",
    *,
    ranks: tuple[int, ...] = (0, 1, 2, 3),
    tensors: str = "",
    spins: bool = False,
) -> m.GroupSighting:
    return m.GroupSighting(name="0", ranks=ranks, entered=entered, number=number, op=op, tensors=tensors, spins=spins)


def look(
    rank: int, probed: m.ProbeAnswer | None = None, state: str = "running", line: int | None = None
) -> m.RankSighting:
    return m.RankSighting(rank=rank, state=state, pid=4000 + rank, seen=probed, line=line)


def waits(
    rank: int, number: int = 2, op: str = "all_reduce", *, line: int = 9, tensors: str = "", unmoved_s: float = 6.0
) -> m.RankSighting:
    groups = (group(number, number, op, tensors=tensors),)
    return look(rank, seen(rank, line=line, call=op, groups=groups, unmoved_s=unmoved_s))


def computes(rank: int, *, function: str = "load()", line: int = 3, entered: int = 1) -> m.RankSighting:
    return look(rank, seen(rank, line=line, function=function, unmoved_s=0.1, groups=(group(entered),)))


def text(*looks: m.RankSighting, source: str = CELL) -> str | None:
    found = diagnose(looks, source=source)
    return found and found.text


def test_the_rank_that_has_not_come_is_named_with_what_it_does() -> None:
    assert text(computes(0), waits(1), waits(2), waits(3)) == (
        "Rank 0 has not reached all_reduce #2; ranks 1-3 wait there (line 9). Rank 0 runs load() (line 3)."
    )


def test_places_say_where_every_rank_is() -> None:
    found = diagnose([computes(0), waits(1)])
    assert found is not None
    assert found.waited_s == 6.0
    assert found.places == (
        m.RankPlace(rank=0, where="runs load()", line=3, waiting=False),
        m.RankPlace(rank=1, where="waits in all_reduce #2", line=9, waiting=True),
    )


def test_a_rank_that_computes_for_long_is_not_a_stall() -> None:
    long = look(0, seen(0, unmoved_s=600.0, idle_s=0.0, groups=(group(3),)))
    assert text(long, look(1, seen(1, unmoved_s=600.0, idle_s=0.0))) is None
    assert not is_suspicious([long])


def test_a_rank_that_sleeps_or_reads_waits_for_nobody() -> None:
    assert text(look(0, seen(0, function="sleep()", groups=(group(0),))), look(1, seen(1))) is None


def test_a_short_wait_is_none() -> None:
    assert text(computes(0), waits(1, unmoved_s=4.0)) is None
    assert is_suspicious([waits(1, unmoved_s=4.0)])


def test_a_wait_that_keeps_its_core_busy_is_one_only_on_gpus() -> None:
    def spinning(*, spins: bool) -> m.RankSighting:
        return look(1, seen(1, idle_s=0.0, groups=(group(2, 2, "all_reduce", spins=spins),)))

    assert text(computes(0), spinning(spins=False)) is None
    assert text(computes(0), spinning(spins=True)) is not None


def test_ranks_that_have_left_are_missed() -> None:
    assert text(look(0, state="left"), waits(1), source="") == (
        "Rank 0 has not reached all_reduce #2; rank 1 waits there (line 9). Rank 0 has left the cell."
    )


def test_a_barrier_under_an_if_that_asks_for_the_rank() -> None:
    gone = [look(rank, state="left") for rank in (1, 2, 3)]
    assert text(waits(0, 1, "barrier", line=6), *gone) == (
        "Only rank 0 called barrier #1 (line 6, inside `if rank == 0`). Ranks 1-3 have left the cell."
    )


def test_the_else_branch_is_not_inside_the_if() -> None:
    gone = [look(rank, state="left") for rank in (1, 2, 3)]
    assert "inside" not in str(text(waits(0, 1, "barrier", line=8), *gone))


def test_different_calls_that_meet_are_reported_by_their_lines() -> None:
    assert text(waits(0, 1, "barrier", line=6), waits(1, 1), waits(2, 1), waits(3, 1)) == (
        "As collective #1 rank 0 calls barrier (line 6, inside `if rank == 0`) and ranks 1-3 call all_reduce (line 9): "
        "collectives match by order, not by name."
    )


def test_different_shapes_that_meet_are_reported() -> None:
    assert text(waits(0, tensors="[4] Float"), waits(1, tensors="[8] Float"), source="") == (
        "As collective #2 rank 0 calls all_reduce of [4] Float (line 9) and rank 1 calls all_reduce of [8] Float "
        "(line 9): collectives match by order, not by name."
    )


def test_ranks_that_wait_for_each_other_in_two_places() -> None:
    pair = group(0, ranks=(0, 1))
    first = look(0, seen(0, call="barrier", groups=(pair, group(1, 1, "barrier"))))
    second = look(1, seen(1, call="all_reduce", groups=(group(1, 1, "all_reduce", ranks=(0, 1)),)))
    told = str(text(first, second, source=""))
    assert "They wait for one another: collectives match by order, not by name." in told


def test_a_subgroup_is_named_by_its_ranks() -> None:
    waiting = look(0, seen(0, call="all_reduce", groups=(group(1, 1, "all_reduce", ranks=(0, 1)),)))
    assert str(text(waiting, computes(1), computes(2))).startswith(
        "Rank 1 has not reached all_reduce #1 of ranks 0-1; rank 0 waits there (line 9)."
    )


def test_all_there_is_reported_only_after_a_long_time() -> None:
    assert text(waits(0), waits(1)) is None
    assert text(waits(0, unmoved_s=40.0), waits(1, unmoved_s=40.0)) == (
        "All of its ranks are in all_reduce #2 (line 9), and it does not end."
    )


def test_a_rendezvous_is_reported_though_nothing_counts_it() -> None:
    waiting = look(1, seen(1, line=2, call="init_process_group"))
    assert text(computes(0), waiting) == (
        "Rank 0 has not reached init_process_group; rank 1 waits there (line 2). Rank 0 runs load() (line 3)."
    )


def test_a_message_between_two_ranks() -> None:
    waiting = look(0, seen(0, line=2, call="recv"))
    assert text(waiting, computes(1)) == (
        "Rank 0 waits in recv (line 2) for another rank. Rank 1 runs load() (line 3)."
    )


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("stopped", "Rank 2 is stopped (SIGSTOP); `kill -CONT 4002` resumes it."),
        ("traced", "Rank 2 (pid 4002) is held by a debugger."),
    ],
)
def test_a_stopped_rank_is_named_at_once(state: str, words: str) -> None:
    assert text(computes(0), look(2, state=state)) == words


def test_a_rank_that_does_not_answer_is_to_blame_only_if_others_wait() -> None:
    silent = look(0, seen(0, line=1, unmoved_s=1.0), state="silent", line=5)
    assert text(silent, computes(1)) is None
    assert str(text(silent, waits(1))).endswith("Rank 0 is in C code that does not release Python's lock (line 5).")


def test_a_rank_without_a_processor_is_not_said_to_hold_pythons_lock() -> None:
    starved = look(0, seen(0, line=1, unmoved_s=1.0), state="starved")
    assert text(starved, computes(1)) is None
    assert str(text(starved, waits(1))).endswith("Rank 0 waits for a processor: its machine is overloaded (line 1).")


def test_a_rank_that_called_it_without_waiting_is_not_missed() -> None:
    gone_on = look(0, seen(0, unmoved_s=0.1, groups=(group(2),)))
    assert str(text(gone_on, waits(1), computes(2))).startswith("Rank 2 has not reached all_reduce #2")


def test_a_rank_that_holds_pythons_lock_is_reported_though_nobody_waits() -> None:
    def silent(silent_s: float) -> m.RankSighting:
        return m.RankSighting(rank=1, state="silent", pid=4001, seen=seen(1, line=4), silent_s=silent_s)

    told = diagnose([look(0, state="left"), silent(12.0)])

    assert told is not None
    assert told.text == "Rank 1 does nothing, in C code that does not release Python's lock (seen last at line 4)."
    assert told.waited_s == 12.0
    assert diagnose([look(0, state="left"), silent(9.0)]) is None


def hopeless_s(*looks: m.RankSighting) -> float:
    diagnosis = diagnose(looks, source=CELL)
    assert diagnosis is not None
    return diagnosis.hopeless_s


def test_a_wait_for_a_rank_that_has_left_is_hopeless() -> None:
    waiting = look(0, seen(0, call="all_reduce", unmoved_s=40.0, groups=(group(2, 2, "all_reduce"),)))
    others = [look(rank, seen(rank, function="load", groups=(group(1),))) for rank in (2, 3)]
    assert hopeless_s(waiting, look(1, state="left"), *others) == 40.0
    assert hopeless_s(waiting, look(1, seen(1, function="load", groups=(group(1),))), *others) == 0.0


def test_a_wait_of_a_subgroup_is_not_hopeless_while_its_ranks_are_there() -> None:
    some = group(2, 2, "all_reduce", ranks=(0, 1))
    waiting = look(0, seen(0, call="all_reduce", unmoved_s=40.0, groups=(some,)))
    here = look(1, seen(1, function="load", groups=(group(1, ranks=(0, 1)),)))
    assert hopeless_s(waiting, here, look(2, state="left"), look(3, state="left")) == 0.0


def test_a_message_is_hopeless_once_all_others_have_left() -> None:
    waiting = look(0, seen(0, call="recv", unmoved_s=40.0))
    assert hopeless_s(waiting, look(1, state="left"), look(2, seen(2))) == 0.0
    assert hopeless_s(waiting, look(1, state="left"), look(2, state="left")) == 40.0


def test_a_rendezvous_without_a_rank_that_has_left_is_hopeless() -> None:
    waiting = look(0, seen(0, call="init_process_group", unmoved_s=40.0))
    assert hopeless_s(waiting, look(1, state="left"), look(2, seen(2))) == 40.0


@pytest.mark.parametrize(
    ("limit_s", "waited_s", "told"),
    [(None, 59.0, None), (None, 61.0, 60.0), (30.0, 31.0, 30.0), (600.0, 61.0, None)],
)
def test_a_hopeless_wait_ends_the_run_after_a_minute_or_its_limit(
    limit_s: float | None, waited_s: float, told: float | None
) -> None:
    events: list[m.RunEvent] = []
    stopped: list[bool] = []
    command = m.Execute(
        run="r",
        group="g",
        ranks=(0, 1),
        cell=m.Cell(source=CELL, filename="Cell"),
        inputs=m.Parcel(data=b""),
        setting=m.Setting(),
        hang_timeout_s=limit_s,
    )
    stalls = Stalls(command, emit=events.append, stop=lambda: stopped.append(True))
    waiting = look(0, seen(0, call="all_reduce", unmoved_s=waited_s, groups=(group(2, 2, "all_reduce"),)))

    stalls.judge([waiting, look(1, state="left")])

    ends = [event for event in events if isinstance(event, m.TimedOut)]
    assert [(event.limit_s, event.left) for event in ends] == ([] if told is None else [(told, limit_s is None)])
    assert bool(stopped) is (told is not None)
