"""What is told of a cluster's nodes, and what they tell. No Ray: it is given what `ray.nodes()` gives."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from jupyter_distrib.events import Ended
from jupyter_distrib.gate.nodes import described
from jupyter_distrib.gate.placing import is_shared
from jupyter_distrib.gate.ray_node import RayNode
from jupyter_distrib.link import encode

NODES = [
    {
        "NodeID": "b",
        "NodeManagerAddress": "10.0.0.8",
        "Resources": {"CPU": 16.0, "memory": 64e9, "GPU": 2.0, "accelerator_type:A10": 1.0, "node:10.0.0.8": 1.0},
    },
    {"NodeID": "a", "NodeManagerAddress": "10.0.0.7", "Resources": {"CPU": 4.0, "memory": 8e9}},
]
SMALL = {"name": "10.0.0.7", "cpus": 4.0, "memory_bytes": 8_000_000_000, "gpus": 0, "gpu_type": ""}
LARGE = {"name": "10.0.0.8", "cpus": 16.0, "memory_bytes": 64_000_000_000, "gpus": 2, "gpu_type": "A10"}


def test_each_node_is_told_with_what_is_free() -> None:
    free = {"a": {"CPU": 1.0}, "b": {"CPU": 16.0, "GPU": 1.0}}
    assert described(NODES, free) == (
        {**SMALL, "free_cpus": 1.0, "free_gpus": 0},
        {**LARGE, "free_cpus": 16.0, "free_gpus": 1},
    )


def test_what_is_free_may_not_be_known() -> None:
    assert described(NODES, {}) == (
        {**SMALL, "free_cpus": None, "free_gpus": None},
        {**LARGE, "free_cpus": None, "free_gpus": None},
    )


def test_answers_that_the_engine_tells_in_the_wrong_order_are_heard_in_theirs() -> None:
    heard: list[str] = []
    lost: list[str] = []
    crew = SimpleNamespace(
        closed=False,
        heard=lambda number, event, fds=(): heard.append(event.run),
        lost=lambda number, why: lost.append(why),
    )
    about = {"host": "n", "interface": "eth0"}
    node = RayNode(SimpleNamespace(crew=crew, remark=""), 0, None, about, shared=True)  # type: ignore[arg-type]

    def answer(number: int, *runs: str) -> tuple[int, list[tuple[bytes, None]]]:
        return number, [(encode(Ended(run=run, at_s=0.0), 0), None) for run in runs]

    node._take(answer(1, "c"))
    node._take(None)  # a call that had nothing to tell
    assert heard == []
    node._take(answer(0, "a", "b"))
    assert heard == ["a", "b", "c"]
    node._take(answer(3))
    assert not lost
    node._take(answer(2, "d"))
    assert heard == ["a", "b", "c", "d"]
    assert lost == ["its agent has ended"]


@pytest.mark.parametrize(
    ("there", "before", "after", "shared"),
    [
        ((7, 100), (7, 100), (7, 100), True),
        ((7, 150), (7, 100), (7, 200), True),  # the notebook was saved meanwhile, twice
        ((7, 100), (7, 100), (7, 200), True),
        ((7, 200), (7, 100), (7, 200), True),
        ((7, 99), (7, 100), (7, 200), False),
        ((7, 201), (7, 100), (7, 200), False),
        ((7, 101), (7, 100), (7, 100), False),
        ((8, 100), (7, 100), (7, 100), False),
        ((7, 100), (7, 100), (8, 100), False),  # another folder of that name has taken its place
        (None, (7, 100), (7, 100), False),
        ((7, 100), None, (7, 100), False),
        ((7, 100), (7, 100), None, False),
    ],
)
def test_a_folder_is_shared_if_it_is_the_same_at_the_same_time(
    there: tuple[int, int] | None, before: tuple[int, int] | None, after: tuple[int, int] | None, shared: bool
) -> None:
    assert is_shared(there, before, after) is shared
