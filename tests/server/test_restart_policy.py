"""Which ends of a run are a reason to start it again. Pure."""

from __future__ import annotations

import signal

import pytest

from jupyter_distrib.server.restart_policy import NoRestart, Restart, RestartPolicy
from jupyter_distrib.wire import messages as m


def lost(
    rank: int = 1, code: int | None = -signal.SIGKILL, *, asked: bool = False, line: int = 0, **more: object
) -> m.Event:
    frames = (m.Frame(filename="<cell>", line=line, function="train"),) if line else ()
    return m.Exited(run="r", rank=rank, pid=7, exit_code=code, asked=asked, frames=frames, **more)  # type: ignore[arg-type]


def failed(rank: int = 0, line: int = 3, *, inside: str = "", broke_device: bool = False) -> m.Event:
    frames = [m.Frame(filename="<cell>", line=line, function="train")]
    if inside:
        frames.append(m.Frame(filename=inside, line=692, function="step"))
    failure = m.Failure(type_name="builtins.ValueError", message="no", frames=tuple(frames))
    return m.Failed(run="r", rank=rank, failure=failure, at_s=1.0, broke_device=broke_device)


def step(number: int) -> m.Event:
    return m.Progressed(run="r", rank=0, label="steps", step=number, total=None, at_s=1.0)


STOPPED = m.Interrupted(run="r", rank=0, frames=(), at_s=1.0)
TIMED_OUT = m.TimedOut(run="r", limit_s=1.0, at_s=1.0)


def decided(*attempts: list[m.Event], max_restarts: int = 5, on_error: bool = False) -> Restart | NoRestart:
    policy = RestartPolicy(max_restarts, on_error=on_error, filename="<cell>")
    decision: Restart | NoRestart = NoRestart()
    for events in attempts:
        for event in events:
            policy.record(event)
        decision = policy.decide()
    return decision


@pytest.mark.parametrize(
    ("events", "cause"),
    [
        ([lost(), STOPPED], "rank 1 was lost (killed by SIGKILL)"),
        ([failed(), lost(2, 3)], "rank 2 was lost (exit code 3)"),
        ([lost(0, -signal.SIGSEGV, line=4)], "rank 0 was lost (killed by SIGSEGV)"),
        ([lost(0, -signal.SIGKILL, out_of_memory=True)], "rank 0 was lost (killed, because memory ran out)"),
        ([lost(3, None, last_lines=("node b was lost: no answer",))], "rank 3 was lost (node b was lost: no answer)"),
    ],
)
def test_a_lost_rank_is_a_reason(events: list[m.Event], cause: str) -> None:
    assert decided(events) == Restart(cause=cause)


@pytest.mark.parametrize(
    "events",
    [
        [],
        [STOPPED, lost()],
        [TIMED_OUT, lost()],
        [lost(asked=True, reason="its ranks were stopped")],
    ],
)
def test_a_stop_and_a_limit_are_no_reason(events: list[m.Event]) -> None:
    assert decided(events) == NoRestart()


def test_an_exception_alone_is_no_reason_and_says_what_makes_it_one() -> None:
    decision = decided([failed(), lost(asked=True)])
    assert isinstance(decision, NoRestart)
    assert "--restart-on error" in decision.reason
    assert decided([failed()], max_restarts=0) == NoRestart()


def test_an_exception_is_a_reason_where_that_was_asked_for() -> None:
    assert decided([failed()], on_error=True) == Restart(cause="rank 0 raised ValueError, line 3")


def test_the_line_of_an_exception_is_that_of_the_cell() -> None:
    inside = failed(inside="/venv/torch/optim/adam.py")
    assert decided([inside], on_error=True) == Restart(cause="rank 0 raised ValueError, line 3")


def test_a_gpu_that_is_broken_is_a_reason_since_its_rank_is_lost() -> None:
    broke = failed(1, broke_device=True)
    cause = "rank 1 lost its GPU (ValueError, line 3)"
    assert decided([broke]) == decided([failed(0), broke]) == Restart(cause=cause)
    assert decided([STOPPED, broke]) == NoRestart()
    again = decided([broke], [broke])
    assert isinstance(again, NoRestart)
    assert again.reason.startswith(cause)


def test_a_stop_comes_before_every_reason() -> None:
    policy = RestartPolicy(3, on_error=True, filename="<cell>")
    policy.stop()
    policy.record(lost())

    assert policy.decide() == NoRestart()


def test_what_is_used_up_is_said() -> None:
    decision = decided([lost()], [lost()], max_restarts=1)

    assert isinstance(decision, NoRestart)
    assert decision.reason == (
        "rank 1 was lost (killed by SIGKILL); not started again, since --max-restarts 1 is used up"
    )


def test_a_crash_at_the_same_place_without_a_step_is_a_loop() -> None:
    crash = lost(0, -signal.SIGSEGV, line=4)
    decision = decided([step(3), crash], [step(3), crash])

    assert isinstance(decision, NoRestart)
    assert "at the same place as before and with no step in between: not started again" in decision.reason
    assert isinstance(decided([step(3), crash], [step(4), crash]), Restart)
    assert isinstance(decided([crash], [lost(0, -signal.SIGSEGV, line=5)]), Restart)


def test_kills_from_outside_are_no_loop() -> None:
    assert isinstance(decided([lost()], [lost()], [lost()]), Restart)


def test_the_same_exception_twice_is_a_loop() -> None:
    assert isinstance(decided([failed(0)], [failed(1)], on_error=True), NoRestart)
    assert isinstance(decided([failed(line=3)], [failed(line=9)], on_error=True), Restart)
