"""The states of a worker group on several nodes: which move follows what happens in which state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from jupyter_distrib.coordinator.group_state import MOVES, MultiNodeState, MultiNodeTrigger
from jupyter_distrib.server.worker_group import StateMachine
from jupyter_distrib.wire import messages as m
from tests.coordinator.test_worker_group import Gathering

S, T = MultiNodeState, MultiNodeTrigger


# ------------------------------------------------------------------------------------------------ what happens


def begin(gathering: Gathering) -> None:
    gathering.run(max_restarts=1, min_ranks=2)


def end(gathering: Gathering) -> None:
    """Have all nodes end the run, and bring the logs that are still asked for."""
    for number, node in enumerate(gathering.nodes):
        gathering.end(number)
        if node.fetching:
            node.answer()


def replace_rank(gathering: Gathering) -> None:
    infos = tuple(m.WorkerInfo(rank=rank, pid=200 + rank, device="cpu") for rank in (2, 3))
    gathering.group.handle_event(1, m.WorkerGroupChanged(group="c", workers=infos, lost=(3,)))


def use_store(gathering: Gathering) -> None:
    for node in range(2):
        gathering.group.handle_event(node, m.GroupsReset(group="c", host="10.0.0.1", port=7))


def lose_node(gathering: Gathering) -> None:
    gathering.group.on_node_lost(1, "it was switched off")


def lose_cluster(gathering: Gathering) -> None:
    gathering.group.lose("the cluster has gone")


def refuse(gathering: Gathering) -> None:
    gathering.group.refuse("there is no room")


def close(gathering: Gathering) -> None:
    gathering.group.close(force=True)


HAPPENS: dict[str, Callable[[Gathering], None]] = {
    "nodes are found": Gathering.place_nodes,
    "all ranks are up": Gathering.open_nodes,
    "a cell comes": begin,
    "the run ends": end,
    "a rank is replaced": replace_rank,
    "all nodes use a new store": use_store,
    "a node is lost": lose_node,
    "the cluster is lost": lose_cluster,
    "there is no room": refuse,
    "the group is closed": close,
}
WAY: dict[S, tuple[str, ...]] = {
    S.LOOKING: (),
    S.STARTING: ("nodes are found",),
    S.READY: ("nodes are found", "all ranks are up"),
    S.RUNNING: ("nodes are found", "all ranks are up", "a cell comes"),
    S.REPAIRING: ("nodes are found", "all ranks are up", "a rank is replaced"),
    S.ENDING: ("nodes are found", "all ranks are up", "a cell comes", "a node is lost"),
}
"""What has happened in each state."""
WAY[S.ENDED] = (*WAY[S.ENDING], "the run ends")
WAY[S.LOOKING_AGAIN] = (*WAY[S.ENDED], "a cell comes")
WAY[S.STARTING_AGAIN] = (*WAY[S.LOOKING_AGAIN], "nodes are found")
WAY[S.USELESS] = ("there is no room",)
WAY[S.CLOSED] = ("the group is closed",)
NEXT: dict[str, dict[S, S]] = {
    "nodes are found": {S.LOOKING: S.STARTING, S.LOOKING_AGAIN: S.STARTING_AGAIN},
    "all ranks are up": {S.STARTING: S.READY, S.STARTING_AGAIN: S.RUNNING},  # the cell that waited begins
    "a cell comes": {S.READY: S.RUNNING, S.ENDED: S.LOOKING_AGAIN},
    "the run ends": {S.RUNNING: S.READY, S.ENDING: S.ENDED},
    "a rank is replaced": {S.READY: S.REPAIRING},
    "all nodes use a new store": {S.REPAIRING: S.READY},
    "a node is lost": {
        **dict.fromkeys((S.LOOKING, S.STARTING, S.READY, S.REPAIRING, S.ENDED), S.USELESS),
        **dict.fromkeys((S.LOOKING_AGAIN, S.STARTING_AGAIN), S.LOOKING_AGAIN),  # for fewer ranks
        S.RUNNING: S.ENDING,
    },
    "there is no room": {
        **dict.fromkeys(set(S) - {S.USELESS, S.CLOSED}, S.USELESS),
        **dict.fromkeys((S.LOOKING_AGAIN, S.STARTING_AGAIN), S.LOOKING_AGAIN),
    },
    "the group is closed": dict.fromkeys(S, S.CLOSED),
}
"""The next state, if it is another one."""
NEXT["the cluster is lost"] = NEXT["a node is lost"]


@pytest.mark.parametrize("what", HAPPENS)
@pytest.mark.parametrize("state", S)
def test_each_thing_that_happens_moves_the_group_as_the_table_says_or_not_at_all(
    state: S, what: str, tmp_path: Path
) -> None:
    gathering = Gathering(tmp_path, opened=False)
    for each in WAY[state]:
        HAPPENS[each](gathering)
    assert gathering.group.state is state
    HAPPENS[what](gathering)
    assert gathering.group.state is NEXT[what].get(state, state)
    assert gathering.group.closed is (gathering.group.state is S.CLOSED)


@pytest.mark.parametrize("state", [S.LOOKING_AGAIN, S.STARTING_AGAIN])
def test_the_group_gives_up_when_there_is_no_room_for_the_fewest_ranks_either(state: S, tmp_path: Path) -> None:
    gathering = Gathering(tmp_path, opened=False)
    for each in (*WAY[state], "there is no room"):
        HAPPENS[each](gathering)
    assert (gathering.group.state, gathering.group.command.size) == (S.LOOKING_AGAIN, 2)
    refuse(gathering)
    assert gathering.group.state is S.USELESS


@pytest.mark.parametrize(("again", "state"), [(False, S.USELESS), (True, S.LOOKING_AGAIN)])
def test_a_run_that_is_not_started_again_at_once_ends_the_group(again: bool, state: S, tmp_path: Path) -> None:
    gathering = Gathering(tmp_path, opened=False)
    for each in (*WAY[S.ENDED], *(["a cell comes"] if again else [])):
        HAPPENS[each](gathering)
    gathering.loop.pass_s(0.0)
    assert gathering.group.state is state


def test_a_repair_that_is_needed_while_ranks_start_has_the_first_cell_wait(tmp_path: Path) -> None:
    gathering = Gathering(tmp_path, opened=False)
    gathering.place_nodes()
    replace_rank(gathering)
    assert gathering.group.state is S.STARTING
    gathering.open_nodes()
    assert gathering.group.state is S.REPAIRING
    gathering.run()
    use_store(gathering)
    assert gathering.group.state is S.RUNNING


def test_a_group_is_opened_once_even_if_a_rank_is_replaced_before_its_node_has_opened(tmp_path: Path) -> None:
    gathering = Gathering(tmp_path, opened=False)
    gathering.place_nodes()
    replace_rank(gathering)
    gathering.open_nodes()
    assert sum(isinstance(event, m.WorkerGroupOpened) for event in gathering.told) == 1
    (opened,) = (event for event in gathering.told if isinstance(event, m.WorkerGroupOpened | m.WorkerGroupChanged))
    assert [info.rank for info in opened.workers] == [0, 1, 2, 3]


ALLOWED: dict[S, dict[T, S]] = {
    S.LOOKING: {T.PLACED: S.STARTING},
    S.STARTING: {T.OPENED: S.READY},
    S.READY: {T.CELL: S.RUNNING, T.REPAIR: S.REPAIRING, T.GROW: S.LOOKING_AGAIN},
    S.RUNNING: {T.OVER: S.READY, T.LOST: S.ENDING},
    S.REPAIRING: {T.REPAIRED: S.READY},
    S.ENDING: {T.OVER: S.ENDED, T.LOST: S.ENDING},
    S.ENDED: {T.CELL: S.LOOKING_AGAIN},
    S.LOOKING_AGAIN: {T.PLACED: S.STARTING_AGAIN, T.FEWER: S.LOOKING_AGAIN},
    S.STARTING_AGAIN: {T.OPENED: S.READY, T.FEWER: S.LOOKING_AGAIN},
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
