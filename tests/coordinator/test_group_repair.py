"""The decision on the process groups of a worker group over two nodes with GPUs, after a run that did not end well."""

from __future__ import annotations

from pathlib import Path

import pytest

from jupyter_distrib.coordinator.group_repair import ANSWER_LIMIT_S
from jupyter_distrib.wire import messages as m
from tests.coordinator.test_worker_group import Gathering


@pytest.fixture
def gathering(tmp_path: Path) -> Gathering:
    made = Gathering(tmp_path, gpus=True)
    made.run()
    return made


def report(gathering: Gathering, node: int, *, finished: bool = True, sequence: int = 5) -> None:
    progress = m.NodeProgress(group="c", run="r", finished=finished, sequences=(sequence,))
    gathering.group.handle_event(node, progress)


def use_store(gathering: Gathering, *nodes: int, port: int = 7) -> None:
    for node in nodes:
        gathering.group.handle_event(node, m.GroupsReset(group="c", host="10.0.0.1", port=port))


def got(gathering: Gathering, kind: type[m.Command]) -> list[int]:
    return [sum(isinstance(command, kind) for command in node.got) for node in gathering.nodes]


def test_groups_stay_when_all_nodes_have_finished_equally_far(gathering: Gathering) -> None:
    gathering.end(0, clean=False)
    report(gathering, 0)
    gathering.end(1, clean=False)
    gathering.run()
    assert got(gathering, m.Execute) == [1, 1], "the cell waits for the other node"
    report(gathering, 1)
    assert got(gathering, m.KeepNodeGroups) == [1, 1]
    assert got(gathering, m.Execute) == [2, 2]
    assert got(gathering, m.MakeStore) == [0, 0]


def test_ranks_of_a_node_that_returned_equally_far_keep_their_groups_too(gathering: Gathering) -> None:
    gathering.end(0, sequences=(5,))
    gathering.end(1, clean=False)
    report(gathering, 1)
    assert got(gathering, m.KeepNodeGroups) == [1, 1]


@pytest.mark.parametrize("other", [{"finished": False}, {"sequence": 6}])
def test_one_node_that_came_less_far_has_all_make_groups_anew(gathering: Gathering, other: dict[str, int]) -> None:
    gathering.end(0, clean=False)
    gathering.end(1, clean=False)
    report(gathering, 0)
    report(gathering, 1, **other)  # type: ignore[arg-type]
    gathering.run()
    assert got(gathering, m.KeepNodeGroups) == [0, 0]
    assert got(gathering, m.MakeStore) == [1, 0]
    use_store(gathering, 0)
    assert got(gathering, m.UseStore) == [0, 1]
    assert got(gathering, m.Execute) == [1, 1], "the cell waits until the other node has taken the store"
    use_store(gathering, 1)
    assert got(gathering, m.Execute) == [2, 2]


def test_nobody_is_waited_for_when_a_rank_is_gone(gathering: Gathering) -> None:
    gathering.group.handle_event(1, m.Exited(run="r", rank=2, pid=1, exit_code=1, asked=False, at_s=0.0))
    gathering.end(0, clean=False)
    gathering.end(1, clean=False)
    assert got(gathering, m.MakeStore) == [1, 0]


def test_a_rank_that_dies_before_the_decision_makes_it(gathering: Gathering) -> None:
    gathering.end(0, clean=False)
    report(gathering, 0)
    gathering.end(1, clean=False)
    infos = tuple(m.WorkerInfo(rank=rank, pid=200 + rank, device="cuda:0") for rank in (2, 3))
    gathering.group.handle_event(1, m.WorkerGroupChanged(group="c", workers=infos, lost=(3,)))
    assert got(gathering, m.MakeStore) == [1, 0]
    report(gathering, 1)
    assert got(gathering, m.KeepNodeGroups) == [0, 0]


def test_a_rank_that_dies_while_a_store_is_made_has_another_one_made(gathering: Gathering) -> None:
    gathering.end(0, clean=False)
    report(gathering, 0, finished=False)
    gathering.end(1, clean=False)
    infos = tuple(m.WorkerInfo(rank=rank, pid=200 + rank, device="cuda:0") for rank in (2, 3))
    gathering.group.handle_event(1, m.WorkerGroupChanged(group="c", workers=infos, lost=(3,)))
    gathering.run()
    use_store(gathering, 0, 1)
    assert got(gathering, m.Execute) == [1, 1]
    use_store(gathering, 0, port=8)
    use_store(gathering, 1)  # the answer for the store before
    assert got(gathering, m.Execute) == [1, 1]
    use_store(gathering, 1, port=8)
    assert got(gathering, m.Execute) == [2, 2]


@pytest.mark.parametrize(
    ("heard", "node", "why"),
    [
        ("nothing", "node b", "it did not report how far its ranks had come within 20 s"),
        ("unfinished", "node a", "it made no new store within 20 s"),
        ("store", "node b", "it did not switch to the new store within 20 s"),
    ],
)
def test_a_node_that_does_not_answer_is_lost(gathering: Gathering, heard: str, node: str, why: str) -> None:
    gathering.end(0, clean=False)
    gathering.end(1, clean=False)
    report(gathering, 0, finished=heard == "nothing")
    if heard == "store":
        use_store(gathering, 0)
    gathering.run()
    gathering.loop.pass_s(ANSWER_LIMIT_S)
    failed = [event for event in gathering.told if isinstance(event, m.Failed)]
    assert {event.failure.message for event in failed} == {
        f"the cell has not begun, because {node} was lost: {why}. Run it again: it will have other ranks."
    }
    (closed,) = (event for event in gathering.told if isinstance(event, m.WorkerGroupClosed))
    assert closed.reason == f"{node} was lost: {why}"
