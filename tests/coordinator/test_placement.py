"""Nodes of a worker group: how they are found, given back and claimed again. No engine."""

from __future__ import annotations

import json
import os
import queue
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from jupyter_distrib.coordinator import placement
from jupyter_distrib.coordinator.engine import ReservedNodes
from jupyter_distrib.coordinator.placement import Placement, Placements, _Found, no_way
from jupyter_distrib.coordinator.relay import stamp
from jupyter_distrib.coordinator.worker_group import Share
from jupyter_distrib.server.worker_group import Client
from jupyter_distrib.wire import messages as m

SOME = m.OpenWorkerGroup(group="a", size=2, gpus=False)


class NoNodes:
    """A reservation that nobody has to wait for."""

    engine = "the engine"
    address_advice = ""

    def give_up(self) -> None: ...


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> Placements:
    monkeypatch.setattr(Placement, "_end", lambda *_: None)
    return Placements(None, lambda command, hello, say: NoNodes())  # type: ignore[arg-type, return-value]


def kernel(session: str = "s", notebook: str = "", torch: str = "2") -> Client:
    versions = {"python": "3", "torch": torch, "cloudpickle": "3"}
    hello = m.Hello(protocol=m.PROTOCOL, session=session, pid=os.getpid(), label=session, notebook=notebook, **versions)
    return Client(link=None, hello=hello)  # type: ignore[arg-type]


def placed(places: Placements, notebook: str = "") -> Placement:
    """A worker group's, which has been given its nodes."""
    place = places.find(kernel(notebook=notebook), SOME)
    place._found = _Found(
        shares=(), agents={"a": "/f"}, gpus=False, engine_has_gpus=False, folder=os.getcwd(), ends_at_s=None
    )
    return place


def test_nodes_that_are_given_back_are_for_the_next_group_that_wants_the_same(places: Placements) -> None:
    place, given = placed(places), list[object]()
    assert places.find(kernel(), SOME) is not place, "a group has it"
    place.give_back(useless=False, killed=False)
    assert places.find(kernel(), replace(SOME, size=3)) is not place
    assert places.find(kernel("another"), SOME) is not place
    assert place._found is not None
    place._command, shares = replace(SOME, size=0, gpus=True), (Share(node=None, size=1, gpus=False),) * 2  # type: ignore[arg-type]
    place._found = replace(place._found, shares=shares)
    again = replace(SOME, group="b", load_env={"A": "1"}, wait_s=3.0)  # what it was given
    assert places.find(kernel(), again) is place
    assert places.find(kernel(), again) is not place, "it is given once"
    place.start(again, SimpleNamespace(on_placed=lambda shares, has_gpus, ends_at_s: given.append(shares)))  # type: ignore[arg-type]
    assert given == [shares]


@pytest.mark.parametrize(("other", "is_used"), [({}, True), ({"user": -1}, False), ({"folder": None}, False)])
def test_values_go_by_the_folder_if_all_nodes_have_it_and_read_our_files(
    places: Placements, other: dict[str, object], is_used: bool
) -> None:
    place = placed(places)
    about = {
        "host": "a",
        "agent_folder": "/f",
        "interface": "lo",
        "machine": "m",
        "folder": stamp(os.getcwd()),
        "user": os.getuid(),
    }
    versions = {"python": "3", "torch": "2", "cloudpickle": "3"}

    def channel(**more: object) -> SimpleNamespace:
        answer: Future[str] = Future()
        answer.set_result(json.dumps({**about, **versions, **more}))
        return SimpleNamespace(ask=lambda *_: answer)

    channels = [channel(), channel(**other)]
    nodes = ReservedNodes(channels=channels, addresses=["a", "b"], sizes=[1, 1], gpus=False, engine_has_gpus=False)
    place._remote_nodes(nodes, os.getcwd())
    assert place.delivery.shared_folder == (os.getcwd() if is_used else "")


def test_the_next_kernel_of_a_notebook_has_its_nodes_and_is_told_all_of_them(places: Placements) -> None:
    place = placed(places, "a.ipynb")
    told: list[object] = []
    place.delivery.send_note_once("r", "said to the first kernel", told.append)
    place.give_back(useless=False, killed=True)
    assert places.find(kernel("other", "b.ipynb"), SOME) is not place
    assert places.find(kernel("next", "a.ipynb", torch="3"), SOME) is not place, "it was restarted for another torch"
    assert places.find(kernel("next", "a.ipynb"), SOME) is place
    place.delivery.send_note_once("r", "said to the first kernel", told.append)
    assert len(told) == 2
    place.give_back(useless=False, killed=True)
    places.find(kernel("other", "b.ipynb"), SOME)
    assert not place._unwanted.is_set()
    places.find(kernel("next", "a.ipynb"), replace(SOME, size=3))
    assert place._unwanted.is_set(), "it need not stay"


def test_nodes_that_the_notebook_exchanges_for_others_are_released_when_all_ranks_have_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placement, "LEAVING_S", 60.0)
    released = queue.SimpleQueue[bool]()
    nodes = NoNodes()
    nodes.release = lambda *, keep_agents: released.put(keep_agents)  # type: ignore[attr-defined]
    places = Placements(None, lambda command, hello, say: nodes)  # type: ignore[arg-type, return-value]
    place = placed(places)
    assert place._found is not None
    place._found = replace(place._found, shares=(Share(node=None, size=1, gpus=False),) * 2)  # type: ignore[arg-type]
    place.give_back(useless=False, killed=False)
    assert places.find(kernel(), replace(SOME, group="b", size=3)) is not place
    for node, group in ((0, "a"), (0, "a"), (1, "one before")):
        place.handle_event(node, m.RanksLeft(group=group))
    assert released.empty()

    place.handle_event(1, m.RanksLeft(group="a"))

    assert released.get(timeout=30) is True, "its agents are kept for the next"


def test_all_nodes_of_a_run_are_brought_the_same_files(places: Placements, tmp_path: Path) -> None:
    place, empty = placed(places), m.Parcel(data=b"", sizes=())
    cell = m.Execute(
        group="a",
        run="r1",
        ranks=(0, 1),
        setting=m.Setting(directory=str(tmp_path)),
        cell=m.Cell(source="", filename="cell"),
        inputs=empty,
    )
    (tmp_path / "a.py").touch()
    assert list(place.delivery.files_for(cell).files) == ["0/a.py"]
    (tmp_path / "b.py").touch()
    assert list(place.delivery.files_for(cell).files) == ["0/a.py"]
    assert list(place.delivery.files_for(replace(cell, run="r2")).files) == ["0/a.py", "0/b.py"]


@pytest.mark.parametrize("gone", ["ended", "_lost"])
def test_nodes_that_are_gone_are_not_given_again(places: Placements, gone: str) -> None:
    place = placed(places)
    place.give_back(useless=False, killed=False)
    setattr(place, gone, True)
    assert places.find(kernel(), SOME) is not place


def test_nodes_of_several_machines_that_have_only_loopback_are_named() -> None:
    one, other = {"host": "10.0.0.1", "interface": "eth0", "machine": "a"}, {"host": "10.0.0.2", "machine": "b"}
    assert no_way([one, {**other, "interface": "eth1"}], "") == ""
    assert no_way([one, {**other, "interface": "lo"}], "start it with an address").startswith(
        "node 10.0.0.2 has no network interface that reaches the other nodes, so its ranks cannot connect to theirs: "
        "start it with an address, or name the interface with"
    )
    assert no_way([{**one, "interface": "lo"}, {**other, "machine": "a", "interface": "lo"}], "") == ""
