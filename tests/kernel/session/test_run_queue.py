"""The queue of submitted runs: who begins when, and what their states are. No ranks."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Mapping
from concurrent.futures import CancelledError
from contextlib import suppress

import pytest

from jupyter_distrib.errors import DistributedError, PoolError, RankLost
from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.kernel.session.runs.observers import EndObserver
from jupyter_distrib.kernel.session.runs.run import PoolLink, Run
from jupyter_distrib.kernel.session.runs.run_queue import Capacity, RunQueue, Submission
from jupyter_distrib.kernel.settings.cell_options import GroupSize
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.descriptors import NO_DESCRIPTORS

ONE = GroupSize(count=1, gpus=False)


class Bed:
    """A queue whose runs begin and end when a test says so."""

    def __init__(self, room: Capacity) -> None:
        self.begun: queue.SimpleQueue[Run] = queue.SimpleQueue()
        self.dropped: list[Run] = []
        self.asked: list[str] = []
        self.stopped: list[Run] = []
        self.patient: list[bool] = []
        self._room = room
        self.queue = RunQueue(self._capacity_of, lambda: None)

    def _capacity_of(self, pool: str, options: Mapping[str, str]) -> Capacity:
        self.asked.append(pool)
        return self._room

    def submit(self, name: str, size: GroupSize = ONE, *, pool: str = "lab", error: Exception | None = None) -> Run:
        run = Run(
            RunRecord(run=name, label=name, ranks=range(size.count or 0), world_size=size.count or 0),
            PoolLink(pool=pool),
            awaited=False,
        )

        def start(patient: bool) -> None:
            self.patient.append(patient)
            if error is not None:
                raise error
            record = RunRecord(run=name, label=name, ranks=range(size.count or 0), world_size=size.count or 0)
            run.begin(record, PoolLink(pool=pool, stop=lambda force: self.stopped.append(run)))
            run.sent()
            self.begun.put(run)

        self.queue.submit(Submission(run=run, pool=pool, size=size, start=start, drop=lambda: self.dropped.append(run)))
        return run

    def next(self) -> str:
        return self.begun.get(timeout=10).id

    def end(self, run: Run) -> None:
        run.deliver(m.Ended(run=run.id, at_s=time.monotonic()), NO_DESCRIPTORS)


@pytest.fixture
def bed() -> Bed:
    return Bed(Capacity(gpus=0, cpus=2))


def test_a_result_comes_when_the_end_has_been_shown(bed: Bed) -> None:
    run = bed.submit("a")
    assert bed.next() == "a"
    seen: list[str] = []
    may_show = threading.Event()

    def show() -> None:
        may_show.wait(0.5)
        seen.append("shown")

    def wait() -> None:
        with suppress(RankLost):  # there are no ranks
            run.result()
        seen.append("result")
        may_show.set()

    run.observers.add(EndObserver(show))
    waiting = threading.Thread(target=wait)
    waiting.start()
    bed.end(run)
    waiting.join()

    assert seen == ["shown", "result"]


def test_as_many_runs_as_there_is_room_for_begin_in_the_order_of_their_calls(bed: Bed) -> None:
    runs = [bed.submit(name) for name in "abcd"]

    assert [bed.next(), bed.next()] == ["a", "b"]
    assert [(run.state, run.place) for run in runs[2:]] == [("queued", 1), ("queued", 2)]
    assert [run.state for run in runs[:2]] == ["running", "running"]
    assert repr(runs[3]) == "Run d of d: queued (place 2)"
    bed.end(runs[1])
    assert bed.next() == "c"
    assert (runs[3].state, runs[3].place) == ("queued", 1)
    bed.end(runs[0])
    assert bed.next() == "d"
    assert bed.asked == ["lab"]


def test_a_queued_run_that_is_moved_up_begins_before_the_one_in_front_of_it(bed: Bed) -> None:
    runs = [bed.submit(name) for name in "abcde"]
    assert [bed.next(), bed.next()] == ["a", "b"]
    bed.queue.move_up(runs[4])
    assert [run.place for run in runs[2:]] == [1, 3, 2]
    bed.queue.move_up(runs[4])
    with pytest.raises(PoolError, match="next one already"):
        bed.queue.move_up(runs[4])
    with pytest.raises(PoolError, match="is not queued: it is running"):
        bed.queue.move_up(runs[0])

    bed.end(runs[0])
    assert bed.next() == "e"
    bed.end(runs[1])
    assert bed.next() == "c"


def test_a_large_run_that_stood_in_the_way_lets_a_small_one_that_is_moved_up_begin_at_once(bed: Bed) -> None:
    bed.submit("a")
    assert bed.next() == "a"
    bed.submit("large", GroupSize(count=2, gpus=False))
    small = bed.submit("small")
    assert small.place == 2
    bed.queue.move_up(small)

    assert bed.next() == "small"


def test_a_run_that_is_larger_than_the_pool_begins_alone_and_is_not_overtaken(bed: Bed) -> None:
    first, large, last = bed.submit("a"), bed.submit("b", GroupSize(count=3, gpus=False)), bed.submit("c")

    assert bed.next() == "a"
    assert (large.state, last.state) == ("queued", "queued")
    bed.end(first)
    assert bed.next() == "b"
    assert last.state == "queued"
    bed.end(large)
    assert bed.next() == "c"
    assert bed.patient == [True, False, True]  # what the pool does not have is refused, not waited for


def test_runs_on_gpus_and_runs_on_the_cpu_do_not_wait_for_each_other() -> None:
    bed = Bed(Capacity(gpus=1, cpus=1))
    gpu = GroupSize(count=1)
    bed.submit("gpu", gpu)
    assert bed.next() == "gpu"
    behind = bed.submit("second gpu", gpu)
    assert behind.state == "queued"
    assert Bed(Capacity(gpus=1, cpus=1)).submit("cpu").state in ("starting", "running")


def test_the_queues_of_two_pools_are_two(bed: Bed) -> None:
    for name in "ab":
        bed.submit(name)
    assert {bed.next(), bed.next()} == {"a", "b"}
    waiting = bed.submit("c")
    bed.submit("elsewhere", pool="other")

    assert bed.next() == "elsewhere"
    assert (waiting.state, waiting.place) == ("queued", 1)


def test_a_run_that_is_refused_says_why_and_the_next_begins(bed: Bed) -> None:
    refused = bed.submit("a", error=PoolError("the pool has no such GPU"))
    bed.submit("b")

    assert bed.next() == "b"
    assert refused.wait_ended(10)
    assert refused.state == "refused"
    with pytest.raises(PoolError, match="no such GPU"):
        refused.result()
    assert bed.dropped == [refused]


def test_a_queued_run_is_cancelled_at_once_and_never_begins(bed: Bed) -> None:
    runs = [bed.submit(name) for name in "abcd"]
    assert {bed.next(), bed.next()} == {"a", "b"}

    runs[2].cancel()

    assert (runs[2].done(), runs[2].state, runs[3].place) == (True, "interrupted", 1)
    assert bed.dropped == [runs[2]]
    with pytest.raises(CancelledError):
        runs[2].result()
    bed.end(runs[0])
    assert bed.next() == "d"


def test_a_running_run_is_stopped_through_its_pool(bed: Bed) -> None:
    run = bed.submit("a")
    bed.next()

    run.cancel()

    assert bed.stopped == [run]
    assert run.state == "stopping"


def test_a_run_can_be_awaited(bed: Bed) -> None:
    run = bed.submit("a", GroupSize(gpus=False))
    bed.next()

    async def main() -> object:
        asyncio.get_running_loop().call_soon(lambda: bed.end(run))
        return await run

    assert asyncio.run(asyncio.wait_for(main(), 10)) is None


def test_to_await_a_run_that_was_stopped_is_not_a_keyboard_interrupt(bed: Bed) -> None:
    for name in "ab":
        bed.submit(name)
    assert {bed.next(), bed.next()} == {"a", "b"}
    queued = bed.submit("c")
    queued.cancel()

    async def main() -> object:
        return await queued

    with pytest.raises(CancelledError, match="cancelled before it began"):
        asyncio.run(main())


def test_the_result_of_a_run_that_was_cancelled_in_the_queue_is_an_ordinary_exception(bed: Bed) -> None:
    for name in "ab":
        bed.submit(name)
    assert {bed.next(), bed.next()} == {"a", "b"}
    queued = bed.submit("c")
    queued.cancel()

    with pytest.raises(CancelledError, match="cancelled before it began, so there is no result: submit it") as raised:
        queued.result(5)
    assert isinstance(raised.value, Exception)
    assert isinstance(raised.value, DistributedError)


def test_what_is_still_queued_when_the_extension_is_unloaded_says_so(bed: Bed) -> None:
    for name in "ab":
        bed.submit(name)
    assert {bed.next(), bed.next()} == {"a", "b"}
    queued = bed.submit("c")

    bed.queue.close()

    with pytest.raises(PoolError, match="still queued when the extension was unloaded"):
        queued.result()
