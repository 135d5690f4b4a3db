"""The checks of the contract suite. Each opens a pool anew and exchanges commands and events with it as
`kernel/session/session.py` does."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from jupyter_distrib.pools.base import Pool
from jupyter_distrib.serialization import exceptions, payload
from jupyter_distrib.testing.pool_client import LIMIT_S, PoolClient
from jupyter_distrib.wire.messages import (
    Attach,
    Attached,
    CloseWorkerGroup,
    Ended,
    Exited,
    Failed,
    Forget,
    Interrupted,
    KeptNames,
    NotAttached,
    Returned,
    Started,
    Stop,
    TimedOut,
    WorkerGroupOpened,
    WorkerGroupRefused,
    Wrote,
)

OpenPool = Callable[[], Pool]
Check = Callable[[OpenPool], None]


@contextmanager
def _client(open_pool: OpenPool) -> Iterator[PoolClient]:
    client = PoolClient(open_pool())
    try:
        yield client
    finally:
        client.close()


@contextmanager
def _group(open_pool: OpenPool, size: int = 2) -> Iterator[tuple[PoolClient, WorkerGroupOpened]]:
    with _client(open_pool) as client:
        group = client.group(size)
        yield client, group
        client.close_group(group)


def opens_and_closes(open_pool: OpenPool) -> None:
    with _client(open_pool) as client:
        group = client.group(3)
        assert [worker.rank for worker in group.workers] == [0, 1, 2]
        assert all(worker.pid > 0 and worker.device == "cpu" for worker in group.workers)
        assert not group.gpus
        client.close_group(group)
        assert not client.lost, "closing a worker group is no loss"


def closes_twice(open_pool: OpenPool) -> None:
    with _client(open_pool) as client:
        group = client.group(1)
        client.close_group(group)
        # The group is unknown by now: there is no answer and no effect.
        client.send(CloseWorkerGroup(group=group.group))
        again = client.group(1)
        client.close_group(again)
    client.close()


def chooses_a_size(open_pool: OpenPool) -> None:
    with _group(open_pool, 0) as (_, group):
        assert group.workers


def refuses_a_size(open_pool: OpenPool) -> None:
    """Check that impossible sizes are refused and a possible one is then served."""
    with _client(open_pool) as client:
        for size in (-1, 1_000_000):
            refused = client.open(size)
            assert isinstance(refused, WorkerGroupRefused), f"{size} ranks: {refused}"
            assert str(size) in refused.reason
        group = client.group(1)
        assert client.run(group, "rank").values == {0: 0}


def gives_values_in_rank_order(open_pool: OpenPool) -> None:
    with _group(open_pool, 3) as (client, group):
        outcome = client.run(group, "(rank, local_rank, world_size)")
        assert outcome.values == {rank: (rank, rank, 3) for rank in range(3)}
        assert {start.pid for start in outcome.of(Started)} <= {worker.pid for worker in group.workers}


def gives_no_value_for_a_statement(open_pool: OpenPool) -> None:
    with _group(open_pool) as (client, group):
        for source in ("x = 1", "None", ""):
            outcome = client.run(group, source)
            assert [event.value for event in outcome.of(Returned)] == [None, None]


def sets_torchruns_variables(open_pool: OpenPool) -> None:
    source = "import os\n[os.environ[n] for n in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'MINE')]"
    with _group(open_pool) as (client, group):
        outcome = client.run(group, source, env={"MINE": "yes"})
        assert outcome.values == {rank: [str(rank), str(rank), "2", "2", "yes"] for rank in range(2)}


def runs_where_the_kernel_is(open_pool: OpenPool) -> None:
    with _group(open_pool) as (client, group):
        outcome = client.run(group, "import os, sys\n(os.getcwd(), sys.argv, __name__)")
        assert outcome.values[0] == (os.getcwd(), ["cell.py"], "__main__")


def sends_output_in_order(open_pool: OpenPool) -> None:
    source = "import sys\nfor i in range(500):\n    print('line', i, rank)\nprint('ünï', end='', file=sys.stderr)"
    with _group(open_pool) as (client, group):
        outcome = client.run(group, source)
        for rank in range(2):
            assert outcome.text(rank) == "".join(f"line {i} {rank}\n" for i in range(500))
            assert outcome.text(rank, "stderr") == "ünï"


def writes_logs(open_pool: OpenPool) -> None:
    with _group(open_pool) as (client, group):
        (ended,) = client.run(group, "print('to the log of', rank)").of(Ended)
        for rank in range(2):
            with open(os.path.join(ended.log_directory, f"rank{rank}.log"), encoding="utf-8") as log:
                assert log.read() == f"to the log of {rank}\n"
        (ended,) = client.run(group, "rank").of(Ended)
        assert not ended.log_directory, "nobody wrote anything"


def reports_progress_and_numbers(open_pool: OpenPool) -> None:
    source = "for i in jupyter_distrib.progress(range(4), label='epoch'):\n    jupyter_distrib.report(loss=1 / (i + 1))"
    with _group(open_pool, 1) as (client, group):
        kinds = [type(event).__name__ for event in client.run(group, source).events]
        assert kinds.count("Measured") == 4
        assert "Progressed" in kinds


def tells_exceptions(open_pool: OpenPool) -> None:
    source = "def f(d):\n    return d['missing']\n\nif rank == 0:\n    f({})\nelse:\n    print('fine')"
    with _group(open_pool) as (client, group):
        outcome = client.run(group, source)
        failure = outcome.failure(0)
        assert (failure.type_name, failure.message) == ("KeyError", "'missing'")
        places = [(frame.filename, frame.line, frame.function) for frame in failure.frames]
        assert places == [("Cell In[1]", 5, "<module>"), ("Cell In[1]", 2, "f")]
        assert failure.frames[1].text == "return d['missing']"
        assert failure.parcel is not None
        assert isinstance(exceptions.unpack_exception(*payload.from_parcel(failure.parcel, None)), KeyError)
        assert any(outcome.of(kind, 1) for kind in (Returned, Interrupted))
        assert client.run(group, "rank").values == {0: 0, 1: 1}, "a failed run must not spoil the next"


def tells_a_syntax_error(open_pool: OpenPool) -> None:
    with _group(open_pool, 1) as (client, group):
        assert client.run(group, "def f(:\n  pass").failure(0).type_name == "SyntaxError"


def lets_cells_exit(open_pool: OpenPool) -> None:
    with _group(open_pool, 1) as (client, group):
        (returned,) = client.run(group, "import sys\nsys.exit()").of(Returned)
        assert returned.exited_early
        failure = client.run(group, "import sys\nsys.exit(3)").failure(0)
        assert (failure.type_name, failure.code) == ("SystemExit", 3)
        assert client.run(group, "rank").values == {0: 0}


def stops(open_pool: OpenPool) -> None:
    with _group(open_pool) as (client, group):
        thread = client.when(Started, lambda run: client.send(Stop(run=run)))
        outcome = client.run(group, "import time\nwhile True:\n    time.sleep(0.01)")
        assert len(outcome.of(Interrupted)) == 2, outcome.events
        thread.join(LIMIT_S)
        run = client.start(group, "rank")
        assert client.finish(run, (0, 1)).values == {0: 0, 1: 1}
        client.send(Stop(run=run))  # too late: there is no answer and no effect
        assert client.run(group, "rank").values == {0: 0, 1: 1}


def limits_time(open_pool: OpenPool) -> None:
    with _group(open_pool) as (client, group):
        outcome = client.run(group, "import time\nwhile True:\n    time.sleep(0.01)", timeout_s=0.3)
        assert [event.limit_s for event in outcome.of(TimedOut)] == [0.3]
        assert len(outcome.of(Interrupted)) == 2
        assert client.run(group, "rank", timeout_s=LIMIT_S).values == {0: 0, 1: 1}


def keeps_and_forgets(open_pool: OpenPool) -> None:
    with _group(open_pool) as (client, group):
        (first, _) = client.run(group, "mine = [rank]\nother = 1", keep=("mine", "absent")).of(Returned)
        assert first.kept == KeptNames(types={"mine": "list"})
        key = f"{first.run}/mine"
        handle = {"mine": _Kept(key)}
        assert client.run(group, "mine.append(7)\nmine", inputs=handle).values == {0: [0, 7], 1: [1, 7]}
        assert client.run(group, "mine", inputs=handle, ranks=(1,)).values == {1: [1, 7]}
        client.send(Forget(group=group.group, keys=(key,)))
        failure = client.run(group, "mine", inputs=handle).failure(0)
        assert "ValueLost" in failure.message or "ValueLost" in failure.type_name


class _Kept:
    """An object that pickles as a value that a rank keeps; see `RankValue`."""

    def __init__(self, key: str) -> None:
        self.key = key

    def __reduce__(self) -> tuple[Any, ...]:
        return payload.kept_value, (self.key,)


def runs_one_after_another(open_pool: OpenPool) -> None:
    """Check that a run leaves nothing for the next run except its kept values."""
    with _group(open_pool) as (client, group):
        assert client.run(group, "left = 1\nrank").values == {0: 0, 1: 1}
        assert client.run(group, "'left' in globals()").values == {0: False, 1: False}
        for number in range(20):
            assert client.run(group, f"rank + {number}").values == {0: number, 1: number + 1}


def moves_big_values(open_pool: OpenPool) -> None:
    big = bytes(range(256)) * 40_000
    with _group(open_pool) as (client, group):
        outcome = client.run(group, "big[:4], bytearray(big) + bytes([rank])", inputs={"big": bytearray(big)})
        for rank in range(2):
            assert outcome.values[rank] == (bytearray(big[:4]), bytearray(big) + bytes([rank]))


def copies_values(open_pool: OpenPool) -> None:
    mine = [1, 2]
    with _group(open_pool) as (client, group):
        outcome = client.run(group, "a.append(rank)\n(a, a is b)", inputs={"a": mine, "b": mine})
        assert outcome.values == {rank: ([1, 2, rank], True) for rank in range(2)}
        assert mine == [1, 2]


def runs_on_some_ranks(open_pool: OpenPool) -> None:
    with _group(open_pool, 3) as (client, group):
        assert client.run(group, "rank", ranks=(2,)).values == {2: 2}
        assert client.run(group, "rank", ranks=(0, 2)).values == {0: 0, 2: 2}
        assert client.run(group, "rank").values == {0: 0, 1: 1, 2: 2}


def tells_that_a_group_is_gone(open_pool: OpenPool) -> None:
    """Check that a cell which was sent before its ranks were closed still ends."""
    with _client(open_pool) as client:
        group = client.group(1)
        client.close_group(group)
        assert client.run(group, "rank").of(Exited)


def ends_the_run_of_a_group_that_is_closed(open_pool: OpenPool) -> None:
    """Check that a run ends when its worker group is closed, with the reason."""
    with _client(open_pool) as client:
        group = client.group(2)
        thread = client.when(
            Started, lambda _: client.send(CloseWorkerGroup(group=group.group, reason="of this check")), 1
        )
        outcome = client.run(group, "import time\nwhile True:\n    time.sleep(0.01)")
        thread.join(LIMIT_S)
        for event in outcome.events:
            assert not isinstance(event, (Returned, Failed)), event
            assert not isinstance(event, Exited) or (event.asked and event.reason == "of this check"), event
        again = client.group(1)
        assert client.run(again, "rank").values == {0: 0}
        client.close_group(again)


def numbers_ranks_from_the_first(open_pool: OpenPool) -> None:
    """Check one node of several, whose ranks are part of a larger world."""
    with _client(open_pool) as client:
        group = client.group(2, first_rank=2, world_size=4)
        source = "import os\n(rank, local_rank, world_size, os.environ['RANK'], os.environ['LOCAL_RANK'])"
        outcome = client.run(group, source)
        assert outcome.values == {2: (2, 0, 4, "2", "0"), 3: (3, 1, 4, "3", "1")}
        client.close_group(group)


def attaches(open_pool: OpenPool) -> None:
    """Check that a detached run outlives its kernel's link and that another kernel gets its whole record."""
    source = "import time\nprint('first', rank)\nwhile not os.path.exists(flag):\n    time.sleep(0.01)\n"
    source += "print('last')\nrank * 10"
    flag = f"/tmp/jupyter_distrib-{os.getpid()}-{time.monotonic_ns()}"  # noqa: S108
    with _client(open_pool) as client:
        group = client.group(2)
        run = client.start(group, "import os\n" + source, inputs={"flag": flag}, detached=True, label="train")
        client.wait(Wrote)
    try:
        with _client(open_pool) as other:
            other.send(Attach(run=run))
            attached = other.wait(Attached)
            assert (attached.run, attached.ranks, attached.world_size, attached.label) == (run, (0, 1), 2, "train")
            os.close(os.open(flag, os.O_CREAT | os.O_EXCL, 0o600))
            outcome = other.finish(run, (0, 1))
            assert outcome.values == {0: 0, 1: 10}
            assert outcome.text(1) == "first 1\nlast\n"
        with _client(open_pool) as third:
            third.send(Attach(run=run))
            third.wait(Attached)
            assert third.finish(run, (0, 1)).values == {0: 0, 1: 10}
    finally:
        os.unlink(flag)


def knows_no_such_run(open_pool: OpenPool) -> None:
    with _client(open_pool) as client:
        client.send(Attach(run="nowhere-1"))
        assert client.wait(Attached, NotAttached).run == "nowhere-1"


CHECKS: tuple[Check, ...] = (
    opens_and_closes,
    closes_twice,
    chooses_a_size,
    refuses_a_size,
    gives_values_in_rank_order,
    gives_no_value_for_a_statement,
    sets_torchruns_variables,
    runs_where_the_kernel_is,
    sends_output_in_order,
    writes_logs,
    reports_progress_and_numbers,
    tells_exceptions,
    tells_a_syntax_error,
    lets_cells_exit,
    stops,
    limits_time,
    keeps_and_forgets,
    runs_one_after_another,
    moves_big_values,
    copies_values,
    runs_on_some_ranks,
    tells_that_a_group_is_gone,
    ends_the_run_of_a_group_that_is_closed,
    numbers_ranks_from_the_first,
    knows_no_such_run,
)
DETACHED: tuple[Check, ...] = (attaches,)
"""The checks of pools whose runs can outlive the kernel's link."""
