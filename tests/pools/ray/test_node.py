"""One node of a Ray cluster as the coordinator holds it, and nodes that are claimed again. No Ray."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from jupyter_distrib.coordinator.worker_group import Share
from jupyter_distrib.pools.ray.node import RayNode
from jupyter_distrib.pools.ray.object_store import PART_BYTES, ContentPart, Receive
from jupyter_distrib.pools.ray.placement import Placements, RayPlacement
from jupyter_distrib.pools.ray.placement_plan import Wanted
from jupyter_distrib.serialization.shared_memory import GivenUp
from jupyter_distrib.server.client import Client
from jupyter_distrib.wire.link import decode_frame, encode
from jupyter_distrib.wire.messages import (
    PROTOCOL,
    Cell,
    CloseWorkerGroup,
    Ended,
    Execute,
    Failed,
    Forget,
    Hello,
    Interrupted,
    OpenWorkerGroup,
    Parcel,
    Setting,
    Stop,
)


def test_answers_that_the_engine_tells_in_the_wrong_order_are_heard_in_theirs() -> None:
    heard: list[str] = []
    lost: list[str] = []
    group = SimpleNamespace(
        closed=False,
        heard=lambda number, event, fds=(): heard.append(event.run),
        lost=lambda number, why: lost.append(why),
    )
    about = {"host": "n", "interface": "eth0"}
    place = SimpleNamespace(group=group, remark="", told=set(), over=False, lost=group.lost)
    node = RayNode(place, 0, None, about, shared=True)  # type: ignore[arg-type]

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


class Asked:
    """An actor that notes what it is asked, by name and arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[object, ...]]] = []

    def __getattr__(self, name: str) -> SimpleNamespace:
        def remote(*arguments: object) -> SimpleNamespace:
            self.calls.append((name, arguments))
            return SimpleNamespace(future=Future)

        return SimpleNamespace(remote=remote)


class Sending:
    """A node, and a cell on its way to it whose content comes in parts."""

    def __init__(self) -> None:
        self.heard: list[object] = []
        self.actor = Asked()
        self.receive: Receive
        group = SimpleNamespace(closed=False, heard=lambda number, event, fds=(): self.heard.append(event))
        calls = SimpleNamespace(put=lambda call: call())
        self.place = SimpleNamespace(group=group, remark="", told=set(), over=False, put=self._put, calls=calls)
        about = {"host": "n", "interface": "eth0"}
        self.node = RayNode(self.place, 0, self.actor, about, shared=True)  # type: ignore[arg-type]
        cell, inputs = Cell(source="", filename="cell"), Parcel(data=b"", sizes=())
        self.node.send(Execute(group="c", run="r", ranks=(0, 1), setting=Setting(), cell=cell, inputs=inputs), [0, 1])

    def _put(self, run: str, fds: Sequence[int], receive: Receive) -> None:
        self.receive = receive

    @property
    def asked(self) -> list[str]:
        return [name for name, _ in self.actor.calls]


def test_large_content_comes_in_parts_and_what_is_sent_meanwhile_behind_it() -> None:
    sending, size = Sending(), 2 * PART_BYTES + 1
    assert sending.receive(ContentPart("a", 0, size)) is not None
    sending.node.send(Forget(group="c", keys=()))
    assert sending.receive(ContentPart("b", PART_BYTES, size)) is not None
    assert sending.asked == ["take", "take"]
    sending.receive(ContentPart("c", 2 * PART_BYTES, size))
    assert sending.asked == ["take", "take", "send", "send"]
    assert sending.actor.calls[1][1] == ("b", PART_BYTES, size)
    frame, *last = sending.actor.calls[2][1]
    assert last == ["c", 2 * PART_BYTES, size]
    assert isinstance(frame, bytes)
    assert decode_frame(frame)[1] == 1, "what tells of the parts does not travel"
    assert not sending.heard


def test_a_cell_that_is_stopped_on_its_way_ends_at_once_and_takes_no_more() -> None:
    sending, size = Sending(), 3 * PART_BYTES
    sending.receive(ContentPart("a", 0, size))
    sending.node.send(Forget(group="c", keys=()))
    sending.node.send(Stop(run="other"))
    sending.node.send(Stop(run="r"))
    assert [type(event) for event in sending.heard] == [Interrupted, Interrupted, Ended]
    assert sending.asked == ["take", "discard", "send", "send"], "what was behind it goes on"
    assert sending.receive(ContentPart("b", PART_BYTES, size)) is None
    assert sending.receive(ValueError("full")) is None
    assert len(sending.actor.calls) == 4


def test_a_group_that_is_closed_takes_the_cell_that_is_on_its_way_along() -> None:
    sending = Sending()
    sending.receive(ContentPart("a", 0, 3 * PART_BYTES))
    sending.node.send(CloseWorkerGroup(group="c"))
    sending.node.send(OpenWorkerGroup(group="d", size=2, gpus=False))
    assert sending.receive(ContentPart("b", PART_BYTES, 3 * PART_BYTES)) is None
    assert sending.asked == ["take", "discard", "send", "send"]


@pytest.mark.parametrize("soon", [True, False])
def test_a_cluster_that_has_gone_is_told_whichever_of_rays_calls_raises(tmp_path: Path, soon: bool) -> None:
    """Ray Client: the first, or when one asks for what came of it."""

    def gone(*_: object) -> SimpleNamespace:
        raise ConnectionError("cut")

    class Actor:
        def __getattr__(self, name: str) -> SimpleNamespace:
            return SimpleNamespace(remote=gone if soon else lambda *_: SimpleNamespace(future=gone))

    sending, lost, done = Sending(), list[tuple[int, str]](), list[bool]()
    sending.node.actor = Actor()
    sending.place.lost = lambda number, reason: lost.append((number, reason))
    sending.node.listen()
    assert lost == [(0, "cut"), (0, "cut")]
    sending.receive(ContentPart("a", 0, 1))
    sending.node.send(Forget(group="c", keys=()))
    sending.node.fetch_logs("r", tmp_path, lambda: done.append(True))
    assert done == [True]
    assert not sending.heard, "who listens is told"


SOME = OpenWorkerGroup(group="a", size=2, gpus=False)


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> Placements:
    monkeypatch.setattr(RayPlacement, "_end", lambda *_: None)
    return Placements(None, Wanted(), Future(), Future())  # type: ignore[arg-type]


def kernel(session: str = "s", notebook: str = "", torch: str = "2") -> Client:
    versions = {"python": "3", "torch": torch, "cloudpickle": "3"}
    hello = Hello(protocol=PROTOCOL, session=session, pid=os.getpid(), label=session, notebook=notebook, **versions)
    return Client(link=None, hello=hello)  # type: ignore[arg-type]


def placed(places: Placements, notebook: str = "") -> RayPlacement:
    """A worker group's, which has been given its nodes."""
    place = places.find(kernel(notebook=notebook), SOME)
    place._asked, place._found, place._folder = SOME, ([], False), os.getcwd()
    return place


def test_nodes_that_are_given_back_are_for_the_next_group_that_wants_the_same(places: Placements) -> None:
    place, given = placed(places), list[object]()
    assert places.find(kernel(), SOME) is not place, "a group has it"
    place.give_back(useless=False, killed=False)
    assert places.find(kernel(), replace(SOME, size=3)) is not place
    assert places.find(kernel("another"), SOME) is not place
    assert place._found is not None
    place._asked, shares = replace(SOME, size=0, gpus=True), place._found[0]
    shares += [Share(node=None, size=1, gpus=False)] * 2  # type: ignore[arg-type]
    again = replace(SOME, group="b", load_env={"A": "1"}, wait_s=3.0)  # what it was given
    assert places.find(kernel(), again) is place
    assert places.find(kernel(), again) is not place, "it is given once"
    place.start(again, SimpleNamespace(placed=lambda shares, has_gpus: given.append(shares)))  # type: ignore[arg-type]
    assert given == [shares]


def test_the_next_kernel_of_a_notebook_has_its_nodes_and_is_told_all_of_them(places: Placements) -> None:
    place = placed(places, "a.ipynb")
    place.told.add("said to the first kernel")
    place.give_back(useless=False, killed=True)
    assert places.find(kernel("other", "b.ipynb"), SOME) is not place
    assert places.find(kernel("next", "a.ipynb", torch="3"), SOME) is not place, "it was restarted for another torch"
    assert places.find(kernel("next", "a.ipynb"), SOME) is place
    assert not place.told
    place.give_back(useless=False, killed=True)
    places.find(kernel("other", "b.ipynb"), SOME)
    assert not place._unwanted.is_set()
    places.find(kernel("next", "a.ipynb"), replace(SOME, size=3))
    assert place._unwanted.is_set(), "it need not stay"


def test_all_nodes_of_a_run_are_brought_the_same_files(places: Placements, tmp_path: Path) -> None:
    place, empty = placed(places), Parcel(data=b"", sizes=())
    cell = Execute(
        group="a",
        run="r1",
        ranks=(0, 1),
        setting=Setting(directory=str(tmp_path)),
        cell=Cell(source="", filename="cell"),
        inputs=empty,
    )
    (tmp_path / "a.py").touch()
    assert list(place.found_for(cell).files) == ["0/a.py"]
    (tmp_path / "b.py").touch()
    assert list(place.found_for(cell).files) == ["0/a.py"]
    assert list(place.found_for(replace(cell, run="r2")).files) == ["0/a.py", "0/b.py"]


@pytest.mark.parametrize("gone", ["over", "_lost"])
def test_nodes_that_are_gone_are_not_given_again(places: Placements, gone: str) -> None:
    place = placed(places)
    place.give_back(useless=False, killed=False)
    setattr(place, gone, True)
    assert places.find(kernel(), SOME) is not place


def test_a_cell_whose_content_is_given_up_is_one_that_was_stopped() -> None:
    sending = Sending()
    sending.receive(ContentPart("a", 0, 3 * PART_BYTES))
    sending.receive(GivenUp())
    sending.node.send(Stop(run="r"))
    assert [type(event) for event in sending.heard] == [Interrupted, Interrupted, Ended]
    assert sending.asked == ["take", "discard", "send"]


def test_a_cell_whose_content_cannot_be_put_fails_alone() -> None:
    sending = Sending()
    sending.receive(ContentPart("a", 0, 3 * PART_BYTES))
    sending.node.send(Forget(group="c", keys=()))
    sending.receive(ValueError("the store is full"))
    assert [type(event) for event in sending.heard] == [Failed, Failed, Ended]
    assert "could not be put into Ray's object store: the store is full" in str(sending.heard[0])
    assert sending.asked == ["take", "discard", "send"]
