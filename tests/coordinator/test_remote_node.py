"""One node as the coordinator holds it: what is sent to it and heard from it. No engine."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jupyter_distrib.coordinator import file_sync, remote_node
from jupyter_distrib.coordinator.engine import ContentPart, Receive
from jupyter_distrib.coordinator.remote_node import Delivery, RemoteNode
from jupyter_distrib.serialization.shared_memory import GivenUp
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.link import decode_frame, encode

ABOUT = {"host": "n", "agent_folder": "/f", "interface": "eth0"}
PART_BYTES = 1000


def part(reference: str, number: int, size_bytes: int) -> ContentPart:
    start = number * PART_BYTES
    return ContentPart(reference, start, size_bytes, start + PART_BYTES >= size_bytes)


def test_answers_that_the_engine_tells_in_the_wrong_order_are_heard_in_theirs() -> None:
    heard: list[str] = []
    lost: list[str] = []
    holder = SimpleNamespace(
        delivery=None,
        ended=False,
        handle_event=lambda number, event, fds=(): heard.append(event.run),
        on_node_lost=lambda number, why: lost.append(why),
    )
    node = RemoteNode(holder, 0, None, ABOUT, name="10.0.0.1", shared=True)  # type: ignore[arg-type]

    def answer(number: int, *runs: str) -> tuple[int, list[tuple[bytes, None]]]:
        return number, [(encode(m.Ended(run=run, at_s=0.0), 0), None) for run in runs]

    node._handle_answer(answer(1, "c"))
    node._handle_answer(None)  # a call that had nothing to tell
    assert heard == []
    node._handle_answer(answer(0, "a", "b"))
    assert heard == ["a", "b", "c"]
    node._handle_answer(answer(3))
    assert not lost
    node._handle_answer(answer(2, "d"))
    assert heard == ["a", "b", "c", "d"]
    assert lost == ["its agent has ended"]


class NotedChannel:
    """Notes what is asked of a node, by name and arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[object, ...]]] = []
        self.answers: list[Future[Any]] = []

    def order(self, method: str, *arguments: object) -> object:
        self.calls.append((method, arguments))
        return "ordered"

    def ask(self, method: str, *arguments: object) -> Future[Any]:
        self.calls.append((method, arguments))
        self.answers.append(Future())
        return self.answers[-1]


class Sending:
    """A node, and a cell on its way to it whose content comes in parts."""

    def __init__(self, inputs: m.Parcel | None = None, fds: Sequence[int] = (0, 1)) -> None:
        self.heard: list[object] = []
        self.put: list[str] = []
        self.channel = NotedChannel()
        self.receive: Receive
        self.delivery = SimpleNamespace(
            put=self._put, send_note_once=lambda *_: None, remark="", calls=SimpleNamespace(put=lambda call: call())
        )
        holder = SimpleNamespace(
            delivery=self.delivery,
            ended=False,
            send_note=self.heard.append,
            handle_event=lambda number, event, fds=(): self.heard.append(event),
        )
        self.node = RemoteNode(holder, 0, self.channel, ABOUT, name="10.0.0.1", shared=True)  # type: ignore[arg-type]
        self.execute(inputs or m.Parcel(data=b"", sizes=()), fds)

    def execute(self, inputs: m.Parcel, fds: Sequence[int]) -> None:
        cell = m.Cell(source="", filename="cell")
        self.node.send(m.Execute(group="c", run="r", ranks=(0, 1), setting=m.Setting(), cell=cell, inputs=inputs), fds)

    def _put(self, run: str, fds: Sequence[int], receive: Receive) -> None:
        self.receive = receive
        self.put.append(f"{run} {len(fds)}")

    @property
    def asked(self) -> list[str]:
        return [name for name, _ in self.channel.calls]


def test_large_content_comes_in_parts_and_what_is_sent_meanwhile_behind_it() -> None:
    sending, size = Sending(), 2 * PART_BYTES + 1
    assert sending.receive(part("a", 0, size)) is not None
    sending.node.send(m.Forget(group="c", keys=()))
    assert sending.receive(part("b", 1, size)) is not None
    assert sending.asked == ["add_part", "add_part"]
    sending.receive(part("c", 2, size))
    assert sending.asked == ["add_part", "add_part", "send", "send"]
    assert sending.channel.calls[1][1] == ("b", PART_BYTES, size)
    frame, *last = sending.channel.calls[2][1]
    assert last == ["c", 2 * PART_BYTES, size]
    assert isinstance(frame, bytes)
    assert decode_frame(frame)[1] == 1, "what tells of the parts does not travel"
    assert not sending.heard


def test_a_cell_that_is_stopped_on_its_way_ends_at_once_and_takes_no_more() -> None:
    sending, size = Sending(), 3 * PART_BYTES
    sending.receive(part("a", 0, size))
    sending.node.send(m.Forget(group="c", keys=()))
    sending.node.send(m.Stop(run="other"))
    sending.node.send(m.Stop(run="r"))
    assert [type(event) for event in sending.heard] == [m.Interrupted, m.Interrupted, m.Ended]
    assert sending.asked == ["add_part", "discard", "send", "send"], "what was behind it goes on"
    assert sending.receive(part("b", 1, size)) is None
    assert sending.receive(ValueError("full")) is None
    assert len(sending.channel.calls) == 4


def test_a_group_that_is_closed_takes_the_cell_that_is_on_its_way_along() -> None:
    sending = Sending()
    sending.receive(part("a", 0, 3 * PART_BYTES))
    sending.node.send(m.CloseWorkerGroup(group="c"))
    sending.node.send(m.OpenWorkerGroup(group="d", size=2, gpus=False))
    assert sending.receive(part("b", 1, 3 * PART_BYTES)) is None
    assert sending.asked == ["add_part", "discard", "send", "send"]


def test_a_cell_whose_content_is_given_up_is_one_that_was_stopped() -> None:
    sending = Sending()
    sending.receive(part("a", 0, 3 * PART_BYTES))
    sending.receive(GivenUp())
    sending.node.send(m.Stop(run="r"))
    assert [type(event) for event in sending.heard] == [m.Interrupted, m.Interrupted, m.Ended]
    assert sending.asked == ["add_part", "discard", "send"]


def test_a_cell_whose_content_cannot_be_put_fails_alone() -> None:
    sending = Sending()
    sending.receive(part("a", 0, 3 * PART_BYTES))
    sending.node.send(m.Forget(group="c", keys=()))
    sending.receive(ValueError("the values could not be put: the store is full"))
    assert [type(event) for event in sending.heard] == [m.Failed, m.Failed, m.Ended]
    assert "the values could not be put: the store is full" in str(sending.heard[0])
    assert sending.asked == ["add_part", "discard", "send"]


def segments(*names: str, kept: Sequence[str] = ("s", "t", "u"), cache_bytes: int | None = 10_000) -> m.Parcel:
    return m.Parcel(data=b"", segments=names, kept=tuple(kept), cache_bytes=cache_bytes)


@pytest.fixture
def memory() -> Iterator[int]:
    """The descriptor of one part."""
    fd = os.memfd_create("test")
    os.truncate(fd, PART_BYTES)
    yield fd
    os.close(fd)


def test_a_node_gets_the_segments_that_it_lacks_and_the_new_one_last(memory: int) -> None:
    sending = Sending(segments("s"), [memory, memory])
    assert sending.put == ["r/0/s 2"], "with what tells how much of it is there"
    sending.receive(part("a", 0, PART_BYTES))
    assert sending.channel.calls[0] == ("store", ("s", "a", 0, PART_BYTES))
    name, (frame, *arguments) = sending.channel.calls[1]
    assert (name, arguments) == ("execute", [("s",), []])
    assert isinstance(frame, bytes)
    assert decode_frame(frame)[1] == 1

    sending.execute(segments("s"), [memory])
    assert sending.asked == ["store", "execute", "execute"], "it has the segment"
    sending.execute(segments("u", "s", "t"), [memory, memory, memory, memory])
    assert sending.put[1:] == ["r/0/t+u 1"]
    sending.receive(part("b", 0, PART_BYTES))
    assert sending.put[2:] == ["r/0/u 2"]
    sending.receive(part("c", 0, PART_BYTES))
    assert sending.asked[3:] == ["store", "store", "execute"]


def test_a_node_drops_what_the_kernel_has_dropped_and_what_is_over_the_limit(memory: int) -> None:
    sending = Sending(segments("s"), [memory])
    sending.receive(part("a", 0, PART_BYTES))
    sending.execute(segments("t", kept=["t"]), [memory])
    sending.receive(part("b", 0, PART_BYTES))
    assert sending.channel.calls[-1][1][1:] == (("t",), ["s"])
    sending.execute(segments("u", cache_bytes=PART_BYTES), [memory])
    sending.receive(part("c", 0, PART_BYTES))
    assert sending.channel.calls[-1][1][1:] == (("u",), ["t"])
    sending.execute(segments("s", cache_bytes=None), [memory])  # this node says that it has no room
    sending.receive(part("d", 0, PART_BYTES))
    assert sending.channel.calls[-1][1][1:] == (("s",), ["u", "s"])


def test_a_segment_whose_cell_was_stopped_is_sent_again(memory: int) -> None:
    sending = Sending(segments("s"), [memory])
    sending.receive(part("a", 0, 2 * PART_BYTES))
    sending.node.send(m.Stop(run="r"))
    sending.execute(segments("s"), [memory])
    assert sending.put == ["r/0/s 1", "r/0/s 1"]


def test_after_a_failure_on_the_node_everything_is_sent_again(memory: int) -> None:
    sending = Sending(segments("s"), [memory])
    sending.delivery.reservation = SimpleNamespace(was_raised_on_node=lambda error: True, cause=str)
    sending.receive(part("a", 0, PART_BYTES))
    sending.channel.answers[-1].set_exception(ValueError("it has no room"))
    assert "it has no room" in str(sending.heard[0])
    sending.execute(segments("s"), [memory])
    assert sending.put == ["r/0/s 1", "r/0/s 1"]


@pytest.mark.parametrize("on_node", [True, False], ids=["the node", "the way to it"])
def test_a_file_that_could_not_be_copied_is_reported_unless_the_node_is_out_of_reach(
    tmp_path: Path, on_node: bool
) -> None:
    (tmp_path / "notes.txt").write_text("1")
    told: list[m.Event] = []
    engine = SimpleNamespace(was_raised_on_node=lambda error: on_node, cause=str)
    delivery = Delivery(SimpleNamespace(put=lambda call: call()), engine)  # type: ignore[arg-type]
    holder = SimpleNamespace(delivery=delivery, ended=False, send_note=told.append)
    channel = NotedChannel()
    node = RemoteNode(holder, 0, channel, ABOUT, name="10.0.0.1", shared=False)  # type: ignore[arg-type]
    setting, cell = m.Setting(directory=str(tmp_path)), m.Cell(source="", filename="cell")
    inputs = m.Parcel(data=b"", sizes=())
    node.send(m.Execute(group="c", run="r", ranks=(0,), setting=setting, cell=cell, inputs=inputs))
    channel.answers[[name for name, _ in channel.calls].index("bring")].set_exception(OSError("pod p was evicted"))

    said = [event.text for event in told if isinstance(event, m.Noted)]
    assert said == (["notes.txt could not be copied to node 10.0.0.1 (pod p was evicted)."] if on_node else [])
    node.send(m.Execute(group="c", run="s", ranks=(0,), setting=setting, cell=cell, inputs=inputs))
    brought = [arguments[0] for name, arguments in channel.calls if name == "bring"]
    assert len(brought) == 2
    assert brought[0] == brought[1], "it travels again"


class Copying:
    """A node that lacks the notebook's files, each as large as a part, and has got a cell."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, count: int = 3, raised: bool = True) -> None:
        monkeypatch.setattr(file_sync, "PART_BYTES", 4)
        self.folder = folder
        for number in range(count):
            (folder / f"{number}.txt").write_text("1234")
        self.heard: list[m.Event] = []
        engine = SimpleNamespace(was_raised_on_node=lambda error: raised, cause=str)
        self.delivery = Delivery(SimpleNamespace(put=lambda call: call()), engine)  # type: ignore[arg-type]
        monkeypatch.setattr(self.delivery, "put", lambda name, fds, receive: setattr(self, "receive", receive))
        self.receive: Receive
        holder = SimpleNamespace(
            delivery=self.delivery,
            ended=False,
            send_note=self.heard.append,
            handle_event=lambda number, event, fds=(): self.heard.append(event),
        )
        self.channel = NotedChannel()
        self.node = RemoteNode(holder, 0, self.channel, ABOUT, name="10.0.0.1", shared=False)  # type: ignore[arg-type]

    def execute(self, run: str, fds: Sequence[int] = ()) -> None:
        setting, cell = m.Setting(directory=str(self.folder)), m.Cell(source="", filename="cell")
        inputs = m.Parcel(data=b"", sizes=())
        self.node.send(m.Execute(group="c", run=run, ranks=(0,), setting=setting, cell=cell, inputs=inputs), fds)

    def answer(self, failed: Sequence[tuple[str, str]] = ()) -> None:
        self.channel.answers[-1].set_result(list(failed))

    @property
    def sent(self) -> list[str]:
        """What was sent: the names of files, else the names of calls."""
        return [
            "+".join(name for name, *_ in arguments[0]) if call == "bring" else call  # type: ignore[attr-defined]
            for call, arguments in self.channel.calls
        ]


def test_files_come_one_part_after_another_and_the_cell_behind_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copying = Copying(tmp_path, monkeypatch)
    copying.execute("r")
    copying.node.send(m.Forget(group="c", keys=()))
    assert copying.sent == ["0/0.txt"]
    copying.answer()
    copying.answer()
    assert copying.sent == ["0/0.txt", "0/1.txt", "0/2.txt"]
    copying.answer()
    assert copying.sent[3:] == ["send", "send"]
    copying.execute("s")
    assert copying.sent[5:] == ["send"]


def test_a_cell_does_not_wait_for_files_that_are_one_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copying = Copying(tmp_path, monkeypatch, count=1)
    copying.execute("r")
    assert copying.sent == ["0/0.txt", "send"]


@pytest.mark.parametrize("first", ["files", "content"])
def test_a_cell_goes_when_both_its_content_and_its_files_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    copying = Copying(tmp_path, monkeypatch, count=2)
    copying.execute("r", (0, 1))
    files = copying.channel.answers[-1]
    copying.receive(part("a", 0, 2 * PART_BYTES))
    if first == "content":
        copying.receive(part("b", 1, 2 * PART_BYTES))
    files.set_result([])
    assert copying.sent == ["0/0.txt", "add_part", "0/1.txt"]
    copying.answer()
    if first == "files":
        copying.receive(part("b", 1, 2 * PART_BYTES))
    assert copying.sent == ["0/0.txt", "add_part", "0/1.txt", "send"]
    assert copying.channel.calls[-1][1][1:] == ("b", PART_BYTES, 2 * PART_BYTES)


def test_a_cell_that_is_stopped_while_its_files_are_copied_leaves_the_rest_to_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copying = Copying(tmp_path, monkeypatch)
    copying.execute("r")
    copying.answer()
    copying.node.send(m.Stop(run="r"))
    assert [type(event) for event in copying.heard] == [m.Interrupted, m.Ended]
    copying.answer()  # of the part that was on its way
    assert copying.sent == ["0/0.txt", "0/1.txt", "discard"]
    copying.execute("s")
    assert copying.sent[3:] == ["0/2.txt", "send"], "nothing is copied twice"


def test_files_that_were_on_their_way_when_the_node_went_out_of_reach_travel_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copying = Copying(tmp_path, monkeypatch, raised=False)
    copying.execute("r")
    copying.answer()
    copying.channel.answers[-1].set_exception(ConnectionError())
    assert copying.sent == ["0/0.txt", "0/1.txt", "send"]
    assert not copying.heard
    copying.execute("s")
    copying.answer()
    assert copying.sent[3:] == ["0/1.txt", "0/2.txt"]


def test_files_of_all_parts_that_could_not_be_copied_are_reported_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copying = Copying(tmp_path, monkeypatch)
    copying.execute("r")
    copying.answer([("0/0.txt", "No space left on device")])
    copying.answer()
    copying.answer([("0/2.txt", "No space left on device")])
    assert [event.text for event in copying.heard if isinstance(event, m.Noted)] == [
        "0.txt could not be copied to node 10.0.0.1 (No space left on device), nor could 1 other."
    ]
    assert copying.sent[3:] == ["send"], "the cell may do without them"
    copying.execute("s")
    copying.answer()
    assert copying.sent[4:] == ["0/0.txt", "0/2.txt"]


def test_a_copy_of_many_megabytes_is_reported_before_it_begins_and_once(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(bytes(file_sync.FILE_LIMIT_BYTES))
    told: list[m.Event] = []
    delivery = Delivery(SimpleNamespace(put=lambda call: call()), SimpleNamespace())  # type: ignore[arg-type]
    holder = SimpleNamespace(delivery=delivery, ended=False, send_note=told.append)
    setting, cell = m.Setting(directory=str(tmp_path)), m.Cell(source="", filename="cell")
    inputs = m.Parcel(data=b"", sizes=())
    with pytest.MonkeyPatch.context() as patch:
        for limit_bytes in (3_000_000, 2_000_000):
            patch.setattr(remote_node, "SAID_BYTES", limit_bytes)
            for name in ("n1", "n2"):
                channel = NotedChannel()
                node = RemoteNode(holder, 0, channel, ABOUT, name=name, shared=False)  # type: ignore[arg-type]
                node.send(m.Execute(group="c", run="r", ranks=(0,), setting=setting, cell=cell, inputs=inputs))
                assert [name for name, _ in channel.calls] == ["bring"]
    said = "2 of the notebook's files (2.1 MB) are copied to each node that lacks them."
    assert [event.text for event in told if isinstance(event, m.Noted)] == [said]


def test_logs_of_another_node_land_in_their_folder_and_never_through_a_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    logs, ended = tmp_path / "logs", []
    logs.mkdir()
    (logs / "rank1.log").symlink_to(victim)
    for name in ("rank0.log", "../victim", str(victim), "rank1.log"):
        content: Future[list[tuple[str, bytes]]] = Future()
        content.set_result([(name, b"said")])
        remote_node._write_logs(content, logs, lambda: ended.append(1))
    assert victim.read_text() == "precious"
    assert (logs / "rank0.log").read_bytes() == b"said"
    assert len(ended) == 4
