"""The states of a node's worker group: which move follows what happens in which state. No process is started."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jupyter_distrib.agent.groups.state import MOVES, NodeGroupState, NodeGroupTrigger
from jupyter_distrib.agent.groups.worker_group import NodeWorkerGroup
from jupyter_distrib.server.worker_group import StateMachine
from jupyter_distrib.system.event_loop import Loop
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.descriptors import Descriptors

S, T = NodeGroupState, NodeGroupTrigger


class SilentForkservers:
    """Forkservers that answer no order before the test says so."""

    ready = True

    def __init__(self) -> None:
        self.descriptors: list[Descriptors] = []
        self.refuse: Callable[[str], None] = lambda reason: None

    def fork(self, orders: object, descriptors: Descriptors, started: object, refuse: Callable[[str], None]) -> None:
        self.descriptors.append(descriptors)
        self.refuse = refuse


class Stage:
    """A worker group of three CPU ranks that settle, and what it has told the kernel."""

    def __init__(self, logs: Path) -> None:
        self.loop, self.told, self.forkservers = Loop(), list[m.Event](), SilentForkservers()
        self.group = NodeWorkerGroup(
            m.OpenWorkerGroup(group="c", size=3, gpus=False),
            loop=self.loop,
            forkservers=self.forkservers,  # type: ignore[arg-type]
            gpus=[],
            node_has_gpus=lambda: (False, ""),
            logs=logs,
            emit=self.emit,
        )
        self.group.open()

    def emit(self, event: m.Event, fds: tuple[int, ...]) -> None:
        self.told.append(event)

    def say(self, message: Callable[[int], Any], *states: str) -> None:
        """Have each rank in one of these states send a message."""
        for rank in [rank for rank in self.group.ranks if rank.state in states]:
            self.group.on_message(rank, message(rank.number), ())

    def of(self, kind: type[m.Event]) -> list[Any]:
        return [event for event in self.told if isinstance(event, kind)]

    # ------------------------------------------------------------------------------------------------ what happens

    def become_ready(self) -> None:
        self.say(lambda rank: m.Ready(rank=rank, pid=0, reports_reset=True), "starting")

    def begin(self, *, min_ranks: int = 0) -> None:
        command = m.Execute(
            run="r",
            group="c",
            ranks=(0, 1, 2),
            cell=m.Cell(source="", filename=""),
            inputs=m.Parcel(data=b""),
            setting=m.Setting(),
            min_ranks=min_ranks,
        )
        self.group.execute(command, Descriptors(), self.emit)

    def come_to_the_end(self) -> None:
        self.say(lambda rank: m.Returned(run="r", rank=rank, value=None), "running")

    def fail(self) -> None:
        failure = m.Failure(type_name="ValueError", message="", frames=())
        self.say(lambda rank: m.Failed(run="r", rank=rank, failure=failure, at_s=0.0, awaits_device=True), "running")

    def reset_groups(self) -> None:
        self.group.store.renew()

    def settle(self) -> None:
        self.say(lambda rank: m.DeviceSettled(rank=rank), "starting")

    def lose_rank(self) -> None:
        if (rank := self.group.ranks.current.get(1)) is not None:
            self.group.on_rank_lost(rank, -9, 0)

    def give_up(self) -> None:
        self.group.fail("it is of no use")

    def close_by_kernel(self) -> None:
        self.group.close(force=True)

    def end(self) -> None:
        self.group.close(force=True)
        for rank in self.group.ranks.everyone():
            rank.end()
        self.loop._selector.close()
        for descriptors in self.forkservers.descriptors:
            descriptors.close()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    made.end()


HAPPENS: dict[str, Callable[[Stage], None]] = {
    "all ranks are up": Stage.become_ready,
    "a cell comes": Stage.begin,
    "all ranks return": Stage.come_to_the_end,
    "all ranks fail": Stage.fail,
    "there is a new store": Stage.reset_groups,
    "a rank dies": Stage.lose_rank,
    "the group cannot go on": Stage.give_up,
    "the kernel closes it": Stage.close_by_kernel,
}
WAY: dict[S, tuple[str, ...]] = {
    S.STARTING: (),
    S.READY: ("all ranks are up",),
    S.RUNNING: ("all ranks are up", "a cell comes"),
    S.REPAIRING: ("all ranks are up", "a rank dies"),
    S.USELESS: ("the group cannot go on",),
    S.CLOSED: ("the kernel closes it",),
}
"""What has happened in each state."""
NEXT: dict[str, dict[S, S]] = {
    "all ranks are up": {S.STARTING: S.READY, S.REPAIRING: S.READY},
    "a cell comes": {S.READY: S.RUNNING},
    "all ranks return": {S.RUNNING: S.READY},
    "all ranks fail": {S.RUNNING: S.REPAIRING},
    "there is a new store": {S.READY: S.REPAIRING},
    "a rank dies": {S.STARTING: S.USELESS, S.READY: S.REPAIRING},
    "the group cannot go on": dict.fromkeys(set(S) - {S.CLOSED}, S.USELESS),
    "the kernel closes it": dict.fromkeys(S, S.CLOSED),
}
"""The next state, if it is another one."""


@pytest.mark.parametrize("what", HAPPENS)
@pytest.mark.parametrize("state", S)
def test_each_thing_that_happens_moves_the_group_as_the_table_says_or_not_at_all(
    state: S, what: str, stage: Stage
) -> None:
    for each in WAY[state]:
        HAPPENS[each](stage)
    assert stage.group.state is state
    HAPPENS[what](stage)
    assert stage.group.state is NEXT[what].get(state, state)
    assert stage.group.closed is (stage.group.state is S.CLOSED)


def test_the_kernel_is_told_once_that_all_ranks_are_up_and_then_of_each_loss(stage: Stage) -> None:
    for what in ("all ranks are up", "a rank dies", "all ranks are up"):
        HAPPENS[what](stage)
    assert len(stage.of(m.WorkerGroupOpened)) == 1
    assert [event.lost for event in stage.of(m.WorkerGroupChanged)] == [(1,)]


@pytest.mark.parametrize("way", [("a rank dies",), ("there is a new store",), ("a cell comes", "all ranks fail")])
def test_a_cell_that_comes_while_ranks_are_repaired_begins_when_the_last_one_is_ready(
    way: tuple[str, ...], stage: Stage
) -> None:
    for what in ("all ranks are up", *way):
        HAPPENS[what](stage)
    stage.begin()
    assert (stage.group.state, stage.group.run) == (S.REPAIRING, None)
    happens = stage.become_ready if "a rank dies" in way else stage.settle
    happens()
    assert stage.group.state is S.RUNNING
    assert not stage.of(m.WorkerGroupRefused)


@pytest.mark.parametrize(("way", "told"), [((), m.WorkerGroupRefused), (("all ranks are up",), m.WorkerGroupClosed)])
def test_a_group_that_cannot_go_on_says_so_once_and_whether_it_was_ever_open(
    way: tuple[str, ...], told: type[m.Event], stage: Stage
) -> None:
    for what in (*way, "the group cannot go on", "the group cannot go on"):
        HAPPENS[what](stage)
    assert [type(event) for event in stage.of(m.WorkerGroupRefused | m.WorkerGroupClosed)] == [told]  # type: ignore[arg-type]


def test_a_rank_that_is_lost_in_a_run_is_reported_when_it_is_replaced_and_not_before(stage: Stage) -> None:
    """Another rank may be ready for the next cell while the run still goes on."""
    stage.become_ready()
    stage.begin()
    ranks = stage.group.ranks.current
    failed = m.Failed(
        run="r", rank=0, failure=m.Failure(type_name="E", message="", frames=()), at_s=0.0, awaits_device=True
    )
    stage.group.on_message(ranks[0], failed, ())
    stage.lose_rank()
    stage.group.on_message(ranks[0], m.DeviceSettled(rank=0), ())
    assert (stage.group.state, stage.of(m.WorkerGroupChanged)) == (S.RUNNING, [])
    stage.come_to_the_end()
    assert stage.group.state is S.REPAIRING
    stage.become_ready()
    assert [event.lost for event in stage.of(m.WorkerGroupChanged)] == [(1,)]


ALLOWED: dict[S, dict[T, S]] = {
    S.STARTING: {T.UP: S.READY},
    S.READY: {T.CELL: S.RUNNING, T.REPAIR: S.REPAIRING},
    S.RUNNING: {T.OVER: S.READY},
    S.REPAIRING: {T.UP: S.READY},
    S.USELESS: {},
    S.CLOSED: {},
}
"""The moves from each state, besides those to its end."""


@pytest.mark.parametrize("trigger", T)
@pytest.mark.parametrize("state", S)
def test_each_move_is_allowed_or_refused_as_listed_and_every_state_but_the_last_can_be_left_for_the_end(
    state: S, trigger: T
) -> None:
    wanted = dict(ALLOWED[state])
    if state is not S.CLOSED:
        wanted[T.CLOSE] = S.CLOSED
    if state not in (S.CLOSED, S.USELESS):
        wanted[T.GIVE_UP] = S.USELESS
    machine = StateMachine(state, MOVES)
    moved = machine.move(trigger)
    assert (moved, machine.state) == (trigger in wanted, wanted.get(trigger, state))
