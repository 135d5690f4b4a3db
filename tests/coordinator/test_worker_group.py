"""One worker group over several nodes: what is sent to which node, and when a run is over. No engine, no process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from jupyter_distrib.coordinator import worker_group
from jupyter_distrib.coordinator.run import STOP_LIMIT_S
from jupyter_distrib.coordinator.worker_group import MultiNodeWorkerGroup, Share
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.descriptors import Descriptors


class Later:
    """A loop in which time goes by when it is told to."""

    def __init__(self) -> None:
        self.timers: list[FakeTimer] = []

    def later(self, delay_s: float, call: Callable[[], None]) -> FakeTimer:
        self.timers.append(FakeTimer(delay_s, call))
        return self.timers[-1]

    def soon(self, call: Callable[[], None]) -> None:
        self.later(0.0, call)

    def pass_s(self, limit_s: float) -> None:
        due = [timer for timer in self.timers if timer.delay_s <= limit_s and not timer.cancelled]
        self.timers = [timer for timer in self.timers if timer not in due]
        for timer in due:
            timer.call()


@dataclass(eq=False)
class FakeTimer:
    delay_s: float
    call: Callable[[], None]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


@dataclass(eq=False)
class FakeNode:
    name: str
    host: str = "10.0.0.1"
    interface: str = "eth0"
    got: list[m.Command] = field(default_factory=list)
    fetching: list[tuple[Path, Callable[[], None]]] = field(default_factory=list)

    @property
    def short_name(self) -> str:
        return self.host

    def send(self, command: m.Command, fds: Sequence[int] = ()) -> None:
        self.got.append(command)

    def fetch_logs(self, run: str, directory: Path, done: Callable[[], None]) -> None:
        self.fetching.append((directory, done))

    def answer(self, *logs: str) -> None:
        """Bring these logs, as they were asked for."""
        directory, done = self.fetching.pop(0)
        directory.mkdir(exist_ok=True)
        for name in logs:
            (directory / name).touch()
        done()

    def last(self, kind: type) -> Any:
        return next(command for command in reversed(self.got) if isinstance(command, kind))


class FakePlace:
    given_back = False

    def start(self, command: m.OpenWorkerGroup, group: MultiNodeWorkerGroup) -> None:
        """The test places them."""

    def give_back(self, *, useless: bool, killed: bool) -> None:
        self.given_back = True


class Gathering:
    """A worker group of two nodes with two ranks each, opened."""

    def __init__(self, logs: Path, *, gpus: bool = False, opened: bool = True) -> None:
        self.logs = logs
        self.loop, self.place, self.told = Later(), FakePlace(), list[m.Event]()
        self.nodes = [FakeNode("node a"), FakeNode("node b", host="10.0.0.2")]
        self.group = MultiNodeWorkerGroup(
            m.OpenWorkerGroup(group="c", size=4, gpus=gpus),
            loop=self.loop,  # type: ignore[arg-type]
            find_nodes=lambda command: self.place,
            logs=logs,
            emit=lambda event, fds: self.told.append(event),
        )
        self.group.open()
        if opened:
            self.place_nodes(gpus=gpus)
            self.open_nodes()

    def place_nodes(self, *, gpus: bool = False, ends_at_s: float | None = None) -> None:
        self.group.on_placed([Share(node=node, size=2, gpus=gpus) for node in self.nodes], ends_at_s=ends_at_s)

    def open_nodes(self) -> None:
        for number in range(2):
            infos = tuple(m.WorkerInfo(rank=2 * number + n, pid=100 + 2 * number + n, device="cpu") for n in range(2))
            self.group.handle_event(number, m.WorkerGroupOpened(group="c", workers=infos, gpus=False))

    def run(self, **more: Any) -> None:
        command = m.Execute(
            run="r",
            group="c",
            ranks=(0, 1, 2, 3),
            cell=m.Cell(source="", filename=""),
            inputs=m.Parcel(data=b""),
            setting=m.Setting(),
            **more,
        )
        self.group.execute(command, Descriptors(), lambda event, fds: self.told.append(event))

    def end(self, node: int, **more: Any) -> None:
        self.group.handle_event(node, m.Ended(run="r", at_s=0.0, **more))

    def ends(self) -> list[m.Ended]:
        return [event for event in self.told if isinstance(event, m.Ended)]


@pytest.fixture
def gathering(tmp_path: Path) -> Gathering:
    return Gathering(tmp_path)


def test_a_start_that_takes_long_tells_how_far_it_is_over_all_nodes_and_what_it_waits_for(tmp_path: Path) -> None:
    gathering = Gathering(tmp_path, opened=False)
    group, loop = gathering.group, gathering.loop
    loop.pass_s(0.4)
    gathering.place_nodes()
    loop.pass_s(0.4)
    for node, up in ((0, 1), (1, 2)):
        group.handle_event(node, m.WorkerGroupStarting(group="c", up=up, size=2, waits_for="the import of torch"))
    gathering.open_nodes()
    loop.pass_s(0.4)
    started = [event for event in gathering.told if isinstance(event, m.WorkerGroupStarting)]
    assert [(each.up, each.size, each.waits_for) for each in started] == [
        (0, 4, "a free node"),
        (0, 4, "the nodes node a, node b"),
        (1, 4, "node a: the import of torch"),
        (3, 4, "node b: the import of torch"),
    ]


def test_it_is_one_group_to_the_notebook(gathering: Gathering) -> None:
    (opened,) = (event for event in gathering.told if isinstance(event, m.WorkerGroupOpened))
    assert [(info.rank, info.node) for info in opened.workers] == [
        (0, "10.0.0.1"),
        (1, "10.0.0.1"),
        (2, "10.0.0.2"),
        (3, "10.0.0.2"),
    ]
    orders = [node.last(m.OpenWorkerGroup) for node in gathering.nodes]
    assert [(each.first_rank, each.size, each.world_size, each.node_rank) for each in orders] == [
        (0, 2, 4, 0),
        (2, 2, 4, 1),
    ]


def test_a_node_has_another_clock_but_seconds_are_as_long(gathering: Gathering) -> None:
    gathering.run()
    before_s = time.monotonic()
    gathering.group.handle_event(0, m.Returned(run="r", rank=0, value=None, began_at_s=5000.0, at_s=5000.25))
    returned = next(event for event in gathering.told if isinstance(event, m.Returned))
    assert before_s <= returned.at_s <= time.monotonic()
    assert returned.began_at_s == pytest.approx(returned.at_s - 0.25)


def test_a_run_ends_once_when_all_nodes_have_ended_it_and_its_logs_are_here(gathering: Gathering) -> None:
    gathering.run()
    assert [node.last(m.Execute).ranks for node in gathering.nodes] == [(0, 1), (2, 3)]
    assert [node.last(m.Execute).run_size for node in gathering.nodes] == [4, 4], "nobody is left out"
    gathering.group.handle_event(0, m.Returned(run="r", rank=0, value=None, kept=m.KeptNames(types={"model": "Net"})))
    gathering.end(0, log_directory="/there")
    gathering.end(1)
    assert gathering.ends() == []
    gathering.nodes[0].answer("rank0.log")
    assert [event.log_directory for event in gathering.ends()] == [str(gathering.logs / "r")]
    assert list(gathering.group.kept) == ["r/model"]
    assert gathering.group.idle


def test_the_others_are_stopped_a_moment_after_the_first_exception(gathering: Gathering) -> None:
    gathering.run()
    failure = m.Failure(type_name="ValueError", message="", frames=())
    gathering.group.handle_event(1, m.Failed(run="r", rank=2, failure=failure, at_s=0.0))
    assert not any(isinstance(command, m.Stop) for command in gathering.nodes[0].got)
    gathering.loop.pass_s(0.5)
    assert gathering.nodes[0].last(m.Stop) == m.Stop(run="r")
    assert not any(isinstance(command, m.Stop) for command in gathering.nodes[1].got), "it stops its own"


def test_the_far_ends_of_cut_connections_are_cut_on_nodes_that_have_ended_the_run_too(gathering: Gathering) -> None:
    gathering.run()
    gathering.end(1, clean=False)
    ends = (("10.0.0.1:1", "10.0.0.2:2"),)
    gathering.group.handle_event(0, m.Connected(run="r", ends=ends))
    assert gathering.nodes[1].last(m.CutRemoteSockets) == m.CutRemoteSockets(run="r", ends=ends)
    assert not any(isinstance(command, m.CutRemoteSockets) for command in gathering.nodes[0].got)


def test_what_a_node_says_of_the_group_it_had_before_is_not_for_this_one(gathering: Gathering) -> None:
    before = list(gathering.told)
    gathering.group.handle_event(0, m.WorkerGroupClosed(group="b", reason="it was stopped"))
    gathering.group.handle_event(0, m.WorkerGroupChanged(group="b", workers=(), lost=(0,)))
    assert gathering.told == before
    assert len(gathering.group.infos()) == 4


def test_after_an_unclean_end_the_next_cell_waits_for_a_new_store(gathering: Gathering) -> None:
    gathering.run()
    gathering.end(0, clean=False)
    gathering.end(1)
    assert gathering.nodes[0].last(m.MakeStore) == m.MakeStore(group="c")
    gathering.run()
    assert [sum(isinstance(command, m.Execute) for command in node.got) for node in gathering.nodes] == [1, 1]
    gathering.group.handle_event(0, m.GroupsReset(group="c", host="10.0.0.1", port=7))
    assert gathering.nodes[1].last(m.UseStore) == m.UseStore(group="c", host="10.0.0.1", port=7)
    gathering.group.handle_event(1, m.GroupsReset(group="c", host="10.0.0.1", port=7))
    assert [sum(isinstance(command, m.Execute) for command in node.got) for node in gathering.nodes] == [2, 2]


def test_a_rank_that_is_replaced_in_mid_run_does_not_take_the_store_away_from_the_others(gathering: Gathering) -> None:
    gathering.run()
    infos = tuple(m.WorkerInfo(rank=rank, pid=200 + rank, device="cpu") for rank in (2, 3))
    gathering.group.handle_event(1, m.WorkerGroupChanged(group="c", workers=infos, lost=(3,)))
    assert not any(isinstance(command, m.MakeStore) for command in gathering.nodes[0].got)
    gathering.end(0)
    gathering.end(1)
    assert gathering.nodes[0].last(m.MakeStore) == m.MakeStore(group="c")


def test_a_cell_that_waits_for_the_store_can_be_stopped(gathering: Gathering) -> None:
    gathering.run()
    gathering.end(0, clean=False)
    gathering.end(1)
    gathering.run()
    gathering.group.stop()
    assert [event.rank for event in gathering.told if isinstance(event, m.Interrupted)] == [0, 1, 2, 3]
    assert len(gathering.ends()) == 2


def gone(gathering: Gathering) -> list[tuple[int, int, bool]]:
    return [(event.rank, event.pid, event.asked) for event in gathering.told if isinstance(event, m.Exited)]


def test_ranks_of_a_lost_node_are_lost_and_the_others_killed_and_their_logs_brought(gathering: Gathering) -> None:
    gathering.run()
    gathering.group.on_node_lost(1, "it was switched off")
    assert gone(gathering) == [(2, 102, False), (3, 103, False)]
    told = next(event for event in gathering.told if isinstance(event, m.Exited))
    assert told.reason == "node b was lost: it was switched off"
    assert gathering.nodes[0].last(m.Stop) == m.Stop(run="r", force=True)
    for rank in range(2):
        gathering.group.handle_event(0, m.Exited(run="r", rank=rank, pid=100 + rank, exit_code=-9, asked=True))
    gathering.end(0, log_directory="/there")
    gathering.nodes[0].answer("rank0.log")
    assert gathering.ends() == [], "only its agent may have gone"
    assert not gathering.place.given_back
    gathering.nodes[1].answer()
    assert [event.log_directory for event in gathering.ends()] == [str(gathering.logs / "r")]
    assert isinstance(gathering.told[-1], m.WorkerGroupClosed)


def test_a_lost_node_is_asked_for_its_logs_for_a_moment_only(gathering: Gathering) -> None:
    gathering.run()
    gathering.group.on_node_lost(1, "it was switched off")
    gathering.end(0, log_directory="/there")
    gathering.loop.pass_s(1.0)
    assert gathering.ends() == [], "those of the other node are waited for"
    gathering.nodes[0].answer("rank0.log")
    assert [event.log_directory for event in gathering.ends()] == [str(gathering.logs / "r")]


def test_nodes_that_do_not_answer_any_more_hold_up_the_end_for_seconds_only(gathering: Gathering) -> None:
    gathering.run()
    gathering.group.on_node_lost(1, "it was switched off")
    gathering.group.on_node_lost(0, "it was switched off too")
    gathering.loop.pass_s(5.0)
    assert gone(gathering) == [(2, 102, False), (3, 103, False), (0, 100, False), (1, 101, False)]
    assert [event.log_directory for event in gathering.ends()] == [""]
    assert [event.reason for event in gathering.told if isinstance(event, m.WorkerGroupClosed)] == [
        "node b was lost: it was switched off"
    ]


def test_all_ranks_of_a_cluster_that_is_lost_are_lost(gathering: Gathering) -> None:
    gathering.run()
    gathering.group.lose("the cluster has gone")
    assert gone(gathering) == [(0, 100, False), (1, 101, False), (2, 102, False), (3, 103, False)]
    gathering.loop.pass_s(1.0)
    assert len(gathering.ends()) == 1
    assert [event.reason for event in gathering.told if isinstance(event, m.WorkerGroupClosed)] == [
        "the cluster has gone"
    ]


def test_ranks_that_cannot_be_killed_are_given_up(gathering: Gathering) -> None:
    gathering.run()
    gathering.group.on_node_lost(1, "it was switched off")
    gathering.loop.pass_s(5.0)
    assert gone(gathering) == [(2, 102, False), (3, 103, False), (0, 100, True), (1, 101, True)]
    assert len(gathering.ends()) == 1


def test_a_time_limit_is_reported_and_stops_all_nodes(gathering: Gathering) -> None:
    gathering.run(timeout_s=5.0)
    gathering.loop.pass_s(5.0)
    assert [event.limit_s for event in gathering.told if isinstance(event, m.TimedOut)] == [5.0]
    assert all(node.last(m.Stop) == m.Stop(run="r") for node in gathering.nodes)


def look(rank: int, line: int, *, waits_s: float = 0.0) -> m.RankSighting:
    """Of a rank that has called the first all_reduce if it waits, and else computes."""
    group = m.GroupSighting(
        name="0", ranks=(0, 1, 2, 3), entered=int(waits_s > 0), number=int(waits_s > 0), op="all_reduce"
    )
    call = "all_reduce" if waits_s else ""
    seen = m.ProbeAnswer(
        run="r", rank=rank, line=line, function="", call=call, unmoved_s=waits_s, idle_s=waits_s, groups=(group,)
    )
    return m.RankSighting(rank=rank, state="running", pid=100 + rank, seen=seen)


def looked(gathering: Gathering, *looks: m.RankSighting) -> None:
    for node in range(2):
        gathering.group.handle_event(
            node, m.NodeSawRanks(run="r", looks=tuple(each for each in looks if each.rank // 2 == node))
        )
    gathering.loop.pass_s(1.0)


def stalls(gathering: Gathering) -> list[str]:
    """What was said of them, in order."""
    told = [event for event in gathering.told if isinstance(event, m.Stalled | m.Moved)]
    return [event.text if isinstance(event, m.Stalled) else "moved" for event in told]


WAITS = "Rank 3 has not reached all_reduce #1; ranks 0-2 wait there (line 4). Rank 3 runs the cell (line 3)."


def test_who_is_waited_for_is_reported_as_if_all_ranks_were_on_one_node(gathering: Gathering) -> None:
    gathering.run()
    for waits_s in (6.0, 31.0):
        looked(gathering, *(look(rank, 4, waits_s=waits_s) for rank in range(3)), look(3, 3))
    assert stalls(gathering) == [WAITS], "once, and never that all of them are there"
    looked(gathering, *(look(rank, 6) for rank in range(4)))
    assert stalls(gathering) == [WAITS, "moved"]


def test_ranks_of_which_nothing_was_heard_yet_have_not_come_and_those_that_have_ended_have_left(
    gathering: Gathering,
) -> None:
    gathering.run()
    gathering.group.handle_event(1, m.Returned(run="r", rank=2, value=None))
    gathering.group.handle_event(1, m.Returned(run="r", rank=3, value=None))
    gathering.end(1)
    looked(gathering, look(0, 4, waits_s=6.0))
    (told,) = stalls(gathering)
    assert told == (
        "Ranks 1-3 have not reached all_reduce #1; rank 0 waits there (line 4). Rank 1 runs the cell. "
        "Ranks 2-3 have left the cell."
    )


@pytest.mark.parametrize("gpus", [True, False])
def test_ranks_on_gpus_that_wait_for_one_that_has_left_early_are_stopped(gathering: Gathering, gpus: bool) -> None:
    """NCCL does not notice that a rank has left; gloo's connections are cut by the rank's own node."""
    gathering.group.command = replace(gathering.group.command, gpus=gpus)
    gathering.run()
    gathering.group.handle_event(1, m.Returned(run="r", rank=3, value=None, exited_early=True))
    looked(gathering, *(look(rank, 4, waits_s=6.0) for rank in range(3)))

    assert [m.Stop(run="r") in node.got for node in gathering.nodes] == [gpus, gpus]


def test_all_nodes_are_probed_deeply_when_ranks_of_one_wait(gathering: Gathering) -> None:
    gathering.run()
    looks = [*(look(rank, 4, waits_s=4.0) for rank in range(2)), *(look(rank, 3) for rank in (2, 3))]
    for _ in range(3):
        looked(gathering, *looks)
    assert gathering.nodes[1].last(m.Probe) == m.Probe(run="r", deep=True)


def test_all_nodes_are_asked_for_stacks_and_their_answers_are_passed_on(gathering: Gathering) -> None:
    gathering.run()
    gathering.group.ask_stacks()
    assert [node.last(m.AskStacks) for node in gathering.nodes] == [m.AskStacks(run="r")] * 2
    gathering.group.handle_event(1, m.StackSeen(run="r", rank=2, frames=(), trouble="is stopped", at_s=0.0))
    assert [event.trouble for event in gathering.told if isinstance(event, m.StackSeen)] == ["is stopped"]


def test_a_hang_timeout_is_reported_once_and_stops_all_nodes(gathering: Gathering) -> None:
    gathering.run(hang_timeout_s=10.0)
    for waits_s in (9.0, 10.0, 11.0):
        looked(gathering, *(look(rank, 4, waits_s=waits_s) for rank in range(3)), look(3, 3))
    assert [(event.limit_s, event.stalled) for event in gathering.told if isinstance(event, m.TimedOut)] == [
        (10.0, True)
    ]
    assert [sum(isinstance(command, m.Stop) for command in node.got) for node in gathering.nodes] == [1, 1]
    assert stalls(gathering) == [WAITS]


def test_a_node_that_does_not_end_a_stopped_run_is_lost(gathering: Gathering) -> None:
    gathering.run()
    gathering.group.stop()
    gathering.end(0, clean=False)
    gathering.loop.pass_s(STOP_LIMIT_S)
    assert gone(gathering) == [(2, 102, False), (3, 103, False)]
    told = next(event for event in gathering.told if isinstance(event, m.Exited))
    assert told.reason == "node b was lost: it did not end the cell within 20 s of the stop"


def test_logs_that_come_after_the_loss_of_a_node_end_nothing_twice(gathering: Gathering) -> None:
    gathering.run()
    gathering.end(0, log_directory="/there")
    gathering.group.on_node_lost(1, "gone")
    gathering.loop.pass_s(5.0)
    assert len(gathering.ends()) == 1
    gathering.nodes[0].answer()
    gathering.nodes[1].answer()
    assert len(gathering.ends()) == 1


def test_the_time_limit_of_the_nodes_is_sent_to_the_run_and_to_later_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(worker_group.time, "monotonic", lambda: now_s)
    gathering = Gathering(tmp_path, opened=False)
    gathering.place_nodes(ends_at_s=now_s + 3600.0)
    gathering.open_nodes()
    gathering.run()
    assert not [event for event in gathering.told if isinstance(event, m.Noted)]
    now_s += 3300.0
    gathering.loop.pass_s(3300.0)
    text = "these ranks reach the time limit in 5 min: save your work."
    assert [event for event in gathering.told if isinstance(event, m.Noted)] == [m.Noted(run="r", rank=None, text=text)]
    gathering.end(0)
    gathering.end(1)
    now_s += 200.0
    gathering.run()
    assert gathering.told[-1] == m.Noted(run="r", rank=None, text=text.replace("5 min", "100 s"))
