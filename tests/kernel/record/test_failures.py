"""From an ended record to the exception: events in, type and text out."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from jupyter_distrib.errors import RankLost, RemoteError, RunTimeout
from jupyter_distrib.kernel.analysis.failures import (
    add_attributes,
    cause,
    in_brief,
    remote_error,
    to_exception,
    to_interrupt,
    to_timeout,
)
from jupyter_distrib.kernel.analysis.lost_peers import is_consequence
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.kernel.views import text as text_view
from jupyter_distrib.system.formatting import duration, rank_list
from jupyter_distrib.wire import messages as m
from tests.kernel.record import golden_run

CELL = "Cell In[5]"
SOURCE = """\
%%distributed --cpu 8
import utils
def train():
    for batch in loader:
        step(batch)

        lr = config["lr"]
        dist.all_reduce(t)
train()
""".splitlines()
C10D = "/opt/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
CLOSED = "[/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4242"


def cell_frame(line: int, function: str = "<module>", first: int = -1, last: int = -1) -> m.Frame:
    return m.Frame(filename=CELL, line=line, function=function, first_column=first, last_column=last)


IN_TRAIN = (cell_frame(9), cell_frame(7, "train", 13, 25))
IN_ALL_REDUCE = (
    cell_frame(9),
    cell_frame(8, "train"),
    m.Frame(filename=C10D, line=83, function="wrapper", text="return func(*args, **kwargs)"),
    m.Frame(filename=C10D, line=2810, function="all_reduce", text="work.wait()"),
)
KEY_ERROR = m.Failure(type_name="KeyError", message="'lr'", frames=IN_TRAIN)
PEER_CLOSED = m.Failure(type_name="RuntimeError", message=CLOSED, frames=IN_ALL_REDUCE)


def source_of(filename: str) -> Sequence[str] | None:
    return SOURCE if filename == CELL else None


def no_object(parcel: m.Parcel) -> BaseException | None:
    return None


def unpickled(parcel: m.Parcel) -> BaseException | None:
    return pickle.loads(parcel.data)  # type: ignore[no-any-return]


def parcel_of(exception: BaseException) -> m.Parcel:
    return m.Parcel(data=pickle.dumps(exception))


def a_record(*events: m.RunEvent, ranks: int = 8) -> RunRecord:
    record = RunRecord(run="r", label=CELL, ranks=range(ranks), world_size=ranks)
    starts = [m.Started(run="r", rank=rank, pid=100 + rank, device="cpu", at_s=1.0) for rank in range(ranks)]
    for event in (*starts, *events, m.Ended(run="r", at_s=9.0)):
        record.apply(event)
    return record


def failed(rank: int, failure: m.Failure = KEY_ERROR, at_s: float = 2.0) -> m.Failed:
    return m.Failed(run="r", rank=rank, failure=failure, at_s=at_s)


def exited(rank: int, code: int | None = -9, at_s: float = 2.0, *, asked: bool = False) -> m.Exited:
    return m.Exited(run="r", rank=rank, pid=100 + rank, exit_code=code, asked=asked, at_s=at_s)


def interrupted(rank: int, frames: tuple[m.Frame, ...] = IN_ALL_REDUCE) -> m.Interrupted:
    return m.Interrupted(run="r", rank=rank, frames=frames, at_s=2.5)


def returned(rank: int, *, early: bool = False) -> m.Returned:
    return m.Returned(run="r", rank=rank, value=None, at_s=1.5, exited_early=early)


def rendered(exception: BaseException) -> str:
    return "\n".join(exception._render_traceback_())  # type: ignore[attr-defined]


def shown(record: RunRecord, *, bold: bool = False) -> str:
    return rendered(to_exception(record, no_object, source_of, 12.0, bold=bold))


# ---------------------------------------------------------------------------------------------------- the cause


def test_the_earliest_failure_is_the_cause() -> None:
    assert cause(a_record(failed(3, at_s=2.2), failed(1, at_s=2.1), failed(2, at_s=2.3))) == 1


@pytest.mark.parametrize(
    "message",
    [
        CLOSED,
        "Connection reset by peer",
        "Broken pipe",
        "NCCL error: remote process exited or there was a network error\nncclRemoteError: A call failed",
        "Application timeout caused pair closure",
        "Socket Timeout",
        "recvValue failed on SocketImpl(fd=5): Connection was likely closed",
        "[Rank 0] NCCL communicator was aborted on rank 0.",
    ],
)
def test_saying_that_a_peer_went_away_is_a_consequence_even_if_it_came_first(message: str) -> None:
    consequence = m.Failure(type_name="torch.distributed.DistBackendError", message=message)
    assert cause(a_record(failed(0, consequence, at_s=1.9), failed(2, at_s=2.0))) == 2


def test_an_exception_raised_from_a_lost_peer_is_a_consequence_too() -> None:
    wrapped = m.Failure(type_name="TrainingError", message="step failed", cause=PEER_CLOSED)
    assert cause(a_record(failed(0, wrapped, at_s=1.9), failed(2, at_s=2.0))) == 2


def test_a_death_is_the_cause_of_the_peers_exceptions() -> None:
    assert cause(a_record(failed(0, PEER_CLOSED, at_s=2.0), exited(1, at_s=2.001))) == 1


def test_a_death_that_we_asked_for_is_not_a_cause() -> None:
    assert cause(a_record(exited(0, asked=True, at_s=1.0), failed(2, at_s=2.0))) == 2


def test_a_rank_that_dies_after_it_returned_is_the_cause() -> None:
    assert cause(a_record(returned(0), exited(0, at_s=2.0), failed(1, PEER_CLOSED, at_s=2.01))) == 0


USERS_OWN = (
    m.Failure(type_name="ConnectionRefusedError", message="[Errno 111] Connection refused", frames=IN_TRAIN),
    m.Failure(type_name="ConnectionResetError", message="[Errno 104] Connection reset by peer", frames=IN_ALL_REDUCE),
    m.Failure(type_name="BrokenPipeError", message="[Errno 32] Broken pipe", frames=IN_TRAIN),
    m.Failure(type_name="RuntimeError", message="database: connection closed by peer", frames=IN_TRAIN),
    m.Failure(
        type_name="RuntimeError",
        message="in this log: NCCL error, connection closed by peer",
        frames=(m.Frame(filename="Cell In[1]", line=9, function="<module>", text="if bad: raise RuntimeError(text)"),),
    ),
    m.Failure(type_name="requests.exceptions.ConnectionError", message="('Connection aborted.', RemoteDisconnected())"),
    m.Failure(type_name="botocore.RemoteError", message="remote error: no such bucket"),
    m.Failure(
        type_name="RuntimeError",
        message="DataLoader worker (pid(s) 7) exited unexpectedly",
        cause=m.Failure(type_name="ConnectionResetError", message="[Errno 104] Connection reset by peer"),
    ),
)


@pytest.mark.parametrize("failure", USERS_OWN, ids=lambda failure: failure.type_name)
def test_a_broken_connection_of_the_users_own_is_not_a_lost_peer(failure: m.Failure) -> None:
    record = a_record(failed(0, failure, at_s=1.9), failed(2, at_s=2.0))
    assert cause(record) == 0
    assert "stopped because" not in shown(record)


def test_a_lost_peer_is_none_if_no_other_rank_left() -> None:
    record = a_record(failed(0, PEER_CLOSED), ranks=1)
    assert not is_consequence(record, record.ranks[0])
    record = a_record(failed(0, PEER_CLOSED, at_s=2.1), failed(1, PEER_CLOSED, at_s=2.0), ranks=2)
    assert [is_consequence(record, rank) for rank in record.ranks.values()] == [True, False]


@pytest.mark.parametrize("other", [returned(1), returned(1, early=True), exited(1), interrupted(1), failed(1)])
def test_a_rank_that_left_makes_a_lost_peer(other: m.RunEvent) -> None:
    record = a_record(failed(0, PEER_CLOSED, at_s=1.9), other, ranks=2)
    assert is_consequence(record, record.ranks[0])


def test_among_consequences_alone_the_earliest_is_the_cause() -> None:
    assert cause(a_record(failed(0, PEER_CLOSED, at_s=2.1), failed(1, PEER_CLOSED, at_s=2.0))) == 1


def test_nothing_is_the_cause_of_a_run_that_was_only_stopped() -> None:
    assert cause(a_record(interrupted(0), returned(1))) is None


# ---------------------------------------------------------------------------------------------------- the rendering


def test_a_failure_is_shown_like_ipython_shows_one() -> None:
    record = a_record(failed(2), *(failed(rank, PEER_CLOSED, 2.01) for rank in (0, 1, 3, 4, 5, 6)), interrupted(7))
    assert shown(record) == textwrap.dedent(
        """\
        KeyError  Traceback (rank 2 of 8)
        Cell In[5], line 9
              7         lr = config["lr"]
              8         dist.all_reduce(t)
        ----> 9 train()
        Cell In[5], line 7, in train(...)
              5         step(batch)
        ----> 7         lr = config["lr"]
                             ^^^^^^^^^^^^
              8         dist.all_reduce(t)
              9 train()
        KeyError: 'lr'
        Rank 2 raised it after 12 s.
        Ranks 0-1, 3-7 stopped because of it (in all_reduce) at Cell In[5], line 8, in train"""
    )


def test_the_same_failure_of_all_ranks_is_shown_once_and_is_small() -> None:
    text = shown(a_record(*(failed(rank, at_s=2 + rank / 1000) for rank in range(8))))
    assert "Traceback (ranks 0-7 of 8)" in text
    assert text.endswith("Ranks 0-7 raised the same after 12 s.")
    assert (text.count("train()"), len(text) < 4096) == (2, True)


def test_the_same_failure_with_other_words_takes_a_line() -> None:
    text = shown(a_record(failed(0), failed(1, m.Failure(type_name="KeyError", message="'wd'", frames=IN_TRAIN), 2.1)))
    assert "Rank 1 raised KeyError: 'wd' at Cell In[5], line 7, in train" in text


@pytest.mark.parametrize(
    "other",
    [
        replace(KEY_ERROR, frames=(cell_frame(2, "other_way"), *IN_TRAIN[1:])),
        replace(KEY_ERROR, frames=(*IN_TRAIN[:-1], replace(IN_TRAIN[-1], first_column=8, last_column=10))),
        replace(KEY_ERROR, notes=("a hint",)),
        replace(KEY_ERROR, cause=m.Failure(type_name="OSError", message="disk full")),
    ],
    ids=["called from another line", "another part of the line", "a note", "another cause"],
)
def test_only_tracebacks_that_are_exactly_equal_are_one(other: m.Failure) -> None:
    text = shown(a_record(failed(0), failed(1, other, 2.1), failed(2, replace(KEY_ERROR), 2.2), failed(3, other, 2.3)))
    assert "Traceback (ranks 0, 2 of 8)" in text
    assert "Ranks 1, 3 raised KeyError: 'lr' at Cell In[5], line 7, in train (another traceback)" in text


def test_the_golden_failures_are_grouped_as_the_live_view_does() -> None:
    record = golden_run.failing_record()
    assert rendered(to_exception(record, no_object, source_of, 12.0)).splitlines()[-3:] == [
        "Ranks 0, 2 raised the same after 12 s.",
        "Rank 1 raised KeyError: 'lr' at Cell In[5], line 9, in train: config['lr'] (another traceback)",
        "Rank 3 stopped because of it",
    ]
    assert [row[0] for row in text_view.statuses(record, 12.0)] == ["ranks 0, 2", "rank 1", "rank 3"]


def test_tracebacks_are_equal_whatever_object_they_carry() -> None:
    mine, yours = (replace(KEY_ERROR, parcel=m.Parcel(data=data)) for data in (b"mine", b"yours"))
    assert "Ranks 0-1 raised the same" in shown(a_record(failed(0, mine), failed(1, yours, 2.1)))


def test_our_frames_are_dropped_and_one_library_frame_is_kept_for_context() -> None:
    import jupyter_distrib.kernel.analysis.failures as ours

    frames = (
        m.Frame(filename=ours.__file__, line=1, function="execute", text="exec(code)"),
        m.Frame(filename="/x/site-packages/jupyter_distrib/worker/main.py", line=1, function="execute"),
        *IN_TRAIN,
        m.Frame(filename=C10D, line=83, function="wrapper", text="return func()"),
        m.Frame(filename=C10D, line=90, function="all_reduce", text="work.wait()"),
    )
    text = shown(a_record(failed(0, m.Failure(type_name="E", message="m", frames=frames))))
    assert f"File {C10D}:90, in all_reduce(...)\n----> 90 work.wait()" in text
    assert ("execute" in text, "wrapper" in text) == (False, False)


def test_files_of_the_user_are_shown_with_the_home_directory_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    frame = m.Frame(filename="/home/ann/proj/utils.py", line=31, function="lookup", text="return d[k]")
    text = shown(a_record(failed(0, m.Failure(type_name="E", message="", frames=(frame,)))))
    assert "File ~/proj/utils.py:31, in lookup(...)\n----> 31 return d[k]\nE\n" in text


def test_a_deep_recursion_is_shortened() -> None:
    frames = tuple(cell_frame(5, "f") for _ in range(1000))
    text = shown(a_record(failed(0, m.Failure(type_name="RecursionError", message="deep", frames=frames))))
    assert "... 994 more frames ..." in text
    assert text.count("in f(...)") == 6


def test_what_an_exception_was_raised_from_and_its_notes_are_shown() -> None:
    inner = m.Failure(type_name="ValueError", message="bad", frames=(cell_frame(5, "train"),))
    outer = m.Failure(type_name="pkg.TrainError", message="no", frames=IN_TRAIN, notes=("hint: try",), cause=inner)
    text = shown(a_record(failed(0, outer)))
    assert "ValueError: bad\n\nThe above exception was the direct cause of the following exception:\n\nTrain" in text
    assert "TrainError: no\nhint: try\nRank 0 raised it" in text
    handled = shown(a_record(failed(0, replace(outer, during=True))))
    assert "During handling of the above exception, another exception occurred:" in handled


def test_a_very_long_message_is_cut() -> None:
    assert len(shown(a_record(failed(0, m.Failure(type_name="E", message="x" * 1_000_000))))) < 4096


def test_colours_come_only_if_asked_for() -> None:
    record = a_record(failed(0))
    assert "\x1b" not in shown(record)
    painted = shown(record, bold=True)
    assert "\x1b[1mKeyError\x1b[22m" in painted
    assert set(re.findall(r"\x1b\[\d+m", painted)) == {"\x1b[1m", "\x1b[22m"}, "colours cannot be read on every ground"


def test_a_rank_that_left_early_while_others_waited_is_named() -> None:
    text = shown(a_record(returned(1, early=True), failed(0, PEER_CLOSED), returned(2)))
    assert "Rank 1 had left the cell early with sys.exit(), while others were waiting for it" in text
    assert "Rank 2 had finished" in text


# ---------------------------------------------------------------------------------------------------- the type


class Custom(Exception):
    """Cannot be unpickled from its arguments."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} {two}")


@dataclass(frozen=True)
class Frozen(Exception):
    code: int


def test_the_users_own_object_is_raised() -> None:
    failure = m.Failure(
        type_name="FileNotFoundError", message="x", parcel=parcel_of(FileNotFoundError(2, "no", "a.txt"))
    )
    exception = to_exception(a_record(failed(2, failure)), unpickled, source_of, 1.0)
    assert isinstance(exception, FileNotFoundError)
    assert (exception.filename, exception.rank, exception.failures) == ("a.txt", 2, {2: failure})  # type: ignore[attr-defined]


def test_the_users_own_object_has_the_cause_that_it_was_raised_from() -> None:
    first = m.Failure(type_name="ExceptionGroup", message="g", parcel=parcel_of(ExceptionGroup("g", [OSError()])))
    second = m.Failure(type_name="KeyError", message="'k'", parcel=parcel_of(KeyError("k")), cause=first, during=True)
    failure = m.Failure(type_name="LookupError", message="", parcel=parcel_of(LookupError()), cause=second)
    exception = to_exception(a_record(failed(0, failure)), unpickled, source_of, 1.0)
    cause = exception.__cause__
    assert (type(exception), repr(cause), exception.__context__) == (LookupError, "KeyError('k')", cause)
    assert cause is not None
    assert (type(cause.__context__).__name__, cause.__cause__) == ("ExceptionGroup", None)
    assert isinstance(
        cause.__context__, RemoteError
    )  # for IPython, which shows no exception with a group in its context


class Evaluated(Exception):
    failures = 0

    def __init__(self, rank: str) -> None:
        super().__init__(rank)
        self.rank = rank


def test_attributes_that_the_users_class_has_stay_as_they_are() -> None:
    failure = m.Failure(type_name="Evaluated", message="gold", parcel=parcel_of(Evaluated("gold")))
    exception = to_exception(a_record(failed(0, failure)), unpickled, source_of, 12.0)
    assert isinstance(exception, Evaluated)
    assert (exception.rank, exception.failures) == ("gold", 0)
    add_attributes(exception, rank=1, results=[2])
    assert (exception.rank, exception.results) == ("gold", [2])  # type: ignore[attr-defined]


def test_the_object_still_pickles_with_its_rendering() -> None:
    failure = m.Failure(type_name="ValueError", message="x", parcel=parcel_of(ValueError("x")))
    exception = to_exception(a_record(failed(2, failure)), unpickled, source_of, 1.0)
    again = pickle.loads(pickle.dumps(exception))
    assert (type(again), again.rank, rendered(again)) == (ValueError, 2, rendered(exception))


def test_an_exception_that_forbids_new_attributes_is_raised_all_the_same() -> None:
    failure = m.Failure(type_name="Frozen", message="7", parcel=m.Parcel(data=b""))
    exception = to_exception(a_record(failed(2, failure)), lambda _: Frozen(7), source_of, 1.0)
    assert isinstance(exception, Frozen)
    assert "Rank 2" in rendered(exception)


def test_an_object_that_cannot_be_unpickled_gets_a_stand_in_of_its_name() -> None:
    failure = m.Failure(type_name="pkg.Custom", message="1 2", parcel=parcel_of(Custom(1, 2)))
    exception = to_exception(a_record(failed(2, failure)), unpickled, source_of, 1.0)
    assert isinstance(exception, RemoteError)
    assert (type(exception).__name__, str(exception)) == ("Custom", "1 2")


@pytest.mark.parametrize("name", ["KeyError", "OSError", "UnicodeDecodeError", "ImportError", "StopIteration"])
def test_a_stand_in_of_a_builtin_is_caught_as_that_and_pickles(name: str) -> None:
    exception = to_exception(a_record(failed(2, m.Failure(type_name=name, message="m"))), no_object, source_of, 1.0)
    again = pickle.loads(pickle.dumps(exception))
    assert [each.__name__ for each in type(again).__mro__[:3]] == [name, "_StandIn", "RemoteError"]
    assert (str(again), again.rank, rendered(again)) == ("m", 2, rendered(exception))
    assert type(again) is type(remote_error(name, ""))


def test_the_name_is_shown_also_when_str_failed() -> None:
    failure = m.Failure(type_name="BadStr", message="(its __str__ raised ValueError)")
    text = shown(a_record(failed(2, failure)))
    assert "\nBadStr: (its __str__ raised ValueError)\n" in text


IN_IPYTHON = """
import asyncio, pickle, sys
from IPython.core.interactiveshell import InteractiveShell
from jupyter_distrib.wire.messages import Ended, Failed, Failure, Parcel
from jupyter_distrib.kernel.analysis.failures import to_exception, to_interrupt
from jupyter_distrib.kernel.record.record import RunRecord

def made(original):
    record = RunRecord(run="r", label="", ranks=(0, 1), world_size=2)
    failure = Failure(type_name=type(original).__name__, message="m", parcel=Parcel(data=b""))
    record.apply(Failed(run="r", rank=1, failure=failure, at_s=1.0))
    return record, to_exception(record, lambda parcel: original, lambda name: None, 1.0)

shell = InteractiveShell.instance(colors="nocolor")
for original in (ValueError("m"), SyntaxError("m"), ExceptionGroup("m", [ValueError()]), asyncio.CancelledError("m")):
    record, exception = made(original)
    shell.user_ns["e"] = exception
    shell.run_cell("raise e")
    print("====")
shell.user_ns["e"] = to_interrupt(record, 41.0)
shell.run_cell("raise e")
"""


def test_ipython_shows_exactly_these_lines_for_types_that_it_treats_specially_too() -> None:
    done = subprocess.run([sys.executable, "-c", IN_IPYTHON], capture_output=True, text=True, check=True, timeout=50)
    value, syntax, group, cancelled, interrupt = done.stdout.split("====\n")
    for name, text in (("ValueError", value), ("SyntaxError", syntax), ("CancelledError", cancelled)):
        assert text.splitlines() == [
            f"{name}  Traceback (rank 1 of 2)",
            f"{name}: m",
            "Rank 1 raised it after 1 s.",
            "Rank 0 had not started",
        ]
    assert group.splitlines()[1] == "ExceptionGroup: m"
    assert interrupt.splitlines()[0] == "KeyboardInterrupt: Stopped by you after 41 s."
    assert done.stderr == ""


def test_a_script_and_a_log_have_the_lines_of_the_rank_below_the_traceback_of_python() -> None:
    original = ValueError("m")
    original.add_note("of the user")
    failure = m.Failure(
        type_name="ValueError", message="m", frames=(cell_frame(8, "train"),), parcel=m.Parcel(data=b"")
    )
    exception = to_exception(a_record(failed(1, failure)), lambda parcel: original, source_of, 1.0, bold=True)

    shown = "".join(traceback.format_exception(exception))
    assert shown.startswith("ValueError: m\nof the user\n\nValueError  Traceback (rank 1 of ")
    assert "Cell In[5], line 8, in train(...)" in shown
    assert "\x1b" not in shown
    assert "Rank 1 raised it after 1 s." in shown
    again = to_exception(a_record(failed(0, failure)), lambda parcel: exception, source_of, 2.0, bold=True)
    assert again.rank == 0, "the one that has raised it now, and not in an earlier cell that has kept it"
    assert "Rank 1 raised it" not in "".join(traceback.format_exception(again))
    stopped = to_interrupt(a_record(failed(1, failure)), 41.0)
    assert "\n\nKeyboardInterrupt: Stopped by you after 41 s.\nRank" in "".join(traceback.format_exception(stopped))


# ---------------------------------------------------------------------------------------------------- exits and deaths


def test_sys_exit_with_a_status_is_a_failure_that_says_so() -> None:
    failure = m.Failure(type_name="SystemExit", message="3", code=3, frames=(cell_frame(8, "train"),))
    exception = to_exception(a_record(failed(1, failure)), no_object, source_of, 1.0)
    assert isinstance(exception, RankLost)
    assert str(exception) == "Rank 1 called sys.exit(3)."
    assert "----> 8         dist.all_reduce(t)" in rendered(exception)


def test_sys_exit_with_a_message_shows_the_message() -> None:
    failure = m.Failure(type_name="SystemExit", message="no GPU", code=1)
    assert str(to_exception(a_record(failed(1, failure)), no_object, source_of, 1.0)) == (
        "Rank 1 called sys.exit('no GPU')."
    )


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (7, "Rank 2 left the process (os._exit or a C exit, status 7) before it finished."),
        (0, "Rank 2 left the process (os._exit or a C exit, status 0) before it finished."),
        (-9, "Rank 2 was killed by SIGKILL."),
        (-11, "Rank 2 crashed with SIGSEGV (segmentation fault)."),
        (-6, "Rank 2 crashed with SIGABRT (aborted)."),
        (-200, "Rank 2 was killed by signal 200."),
        (None, "Rank 2 is gone; it is unknown how its process ended."),
    ],
)
def test_a_death_says_how(code: int | None, expected: str) -> None:
    exception = to_exception(a_record(exited(2, code)), no_object, source_of, 1.0)
    assert isinstance(exception, RankLost)
    assert (str(exception), exception.rank) == (expected, 2)  # type: ignore[attr-defined]
    assert rendered(exception).startswith(f"RankLost: {expected}\n")


def test_the_out_of_memory_killer_is_named_only_when_the_system_says_so() -> None:
    killed = m.Exited(
        run="r", rank=2, pid=1, exit_code=-9, asked=False, out_of_memory=True, peak_rss_bytes=30_800_000_000
    )
    assert str(to_exception(a_record(killed), no_object, source_of, 1.0)) == (
        "Rank 2 was killed by SIGKILL, by the system's out-of-memory killer (peak 30.8 GB)."
    )


def test_the_limit_of_memory_is_told_where_there_is_one() -> None:
    killed = m.Exited(
        run="r", rank=2, pid=1, exit_code=-9, asked=False, out_of_memory=True, peak_rss_bytes=30_800_000_000,
        memory_limit_bytes=32_000_000_000,
    )  # fmt: skip
    assert str(to_exception(a_record(killed), no_object, source_of, 1.0)) == (
        "Rank 2 was killed by SIGKILL, by the system's out-of-memory killer (peak 30.8 GB; the limit of memory is "
        "32.0 GB)."
    )


def test_a_crash_shows_its_python_line_and_the_end_of_standard_error() -> None:
    crash = m.Exited(
        run="r",
        rank=2,
        pid=1,
        exit_code=-11,
        asked=False,
        frames=IN_TRAIN[1:],
        last_lines=("Fatal: x", "at y"),
        at_s=2.0,
    )
    text = shown(a_record(crash, failed(0, PEER_CLOSED, 2.01)))
    assert "----> 7         lr = config" in text
    assert (
        "    Fatal: x\n    at y\nRank 0 stopped because of it (in all_reduce) at Cell In[5], line 8, in train" in text
    )


def test_a_run_that_ended_without_a_cause_is_still_an_exception() -> None:
    exception = to_exception(a_record(returned(0), ranks=2), no_object, source_of, 1.0)
    assert isinstance(exception, RankLost)
    assert "Rank 1 had not finished" in rendered(exception)


# ---------------------------------------------------------------------------------------------------- stops


def test_a_stop_says_where_each_group_of_ranks_was() -> None:
    record = a_record(
        interrupted(0),
        failed(1, PEER_CLOSED),
        interrupted(2, ()),
        exited(2, asked=True),
        returned(3),
        interrupted(4, (cell_frame(2),)),
        ranks=5,
    )
    exception = to_interrupt(record, 41.2, source_of)
    assert isinstance(exception, KeyboardInterrupt)
    assert rendered(exception).splitlines() == [
        "KeyboardInterrupt: Stopped by you after 41 s.",
        "Ranks 0-1: Cell In[5], line 8, in train: dist.all_reduce(t)",
        "Rank 2 did not stop and had to be replaced: names kept there are gone",
        "Rank 3 had finished",
        "Rank 4: Cell In[5], line 2: import utils",
    ]
    assert rendered(pickle.loads(pickle.dumps(exception))) == rendered(exception)


@pytest.mark.parametrize(
    ("ended_s", "told"),
    [
        (2.08, "Rank 0 had to end, since rank 1 was lost: names kept there are gone"),
        (4.5, "Rank 0 did not stop and had to be replaced: names kept there are gone"),
    ],
)
def test_a_rank_that_had_no_time_to_stop_is_not_blamed_for_it(ended_s: float, told: str) -> None:
    record = a_record(exited(1), exited(0, at_s=ended_s, asked=True), ranks=2)
    assert told in rendered(to_exception(record, no_object, source_of, 3.0)).splitlines()
    brief = told.removeprefix("Rank 0 ").partition(":")[0]
    assert in_brief(record, record.ranks[0]) == brief
    assert "was killed by SIGKILL" in in_brief(record, record.ranks[1])


def test_a_timeout_says_its_limit_and_where_the_ranks_were() -> None:
    exception = to_timeout(a_record(interrupted(0), returned(1), ranks=2), 60.0, 60.2, source_of)
    assert isinstance(exception, RunTimeout)
    assert str(exception) == "The run was stopped after 60 s, because its --timeout is 60 s."
    assert "Rank 0: Cell In[5], line 8, in train: dist.all_reduce(t)" in rendered(exception)


# ---------------------------------------------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [((0, 1, 2, 5), "ranks 0-2, 5"), ((3,), "rank 3"), ((2, 0), "ranks 0, 2"), ((0, 1), "ranks 0-1")],
)
def test_ranks_are_named_shortly(ranks: tuple[int, ...], expected: str) -> None:
    assert rank_list(ranks) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.04, "0 s"), (0.31, "0.3 s"), (9.96, "10 s"), (41.4, "41 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")],
)
def test_durations_are_told_like_a_person_would(seconds: float, expected: str) -> None:
    assert duration(seconds) == expected
