"""The relay of a node: what it adds to commands on their way to the agent."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jupyter_distrib.coordinator import relay
from jupyter_distrib.coordinator.node_segments import StoredSegments
from jupyter_distrib.coordinator.relay_inbox import opened
from jupyter_distrib.errors import PoolError
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.link import decode_frame, encode
from tests.processes import is_alive, wait_until_gone
from tests.product.control_groups import memory_group

HERE = "127.0.0.1"
Start = Callable[..., relay.Relay]


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="jdr-"))  # a socket's path has 107 bytes
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Call it with the name of a new folder, and that of a running agent's folder: a relay."""
    relays = []

    def make(name: str, running: str = "") -> relay.Relay:
        (folder / name).mkdir()
        of_node = {HERE: str(folder / running)} if running else {}
        found = relay.Relay(str(folder / name), "notebook", "session", address=HERE, running=of_node)
        relays.append(found)
        return found

    yield make
    for each in relays:
        each.end()
        each._link.close()


def agent_of(started: relay.Relay) -> int:
    return int(json.loads(started.describe([], "."))["agent"])


def test_the_agent_of_an_earlier_group_serves_the_next_and_ends_with_the_last(
    start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "KEPT_S", 2.0)
    first = start("a")
    agent = agent_of(first)
    second = start("b", "a")
    assert agent_of(second) == agent
    first.end()
    third = start("c", "a")
    assert agent_of(third) == agent
    second.end()
    assert is_alive(agent)

    third.end()

    assert wait_until_gone([agent]) == []
    assert [*folder.iterdir()] == []


def test_an_agent_in_another_control_group_is_not_used(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where two containers have the same address and the same folder for temporary files."""
    monkeypatch.setattr(relay, "KEPT_S", 0.1)  # the control group waits for the end of the agent in it
    with memory_group("jd-relay", 1 << 30) as group:
        first = start("a")
        (group / "cgroup.procs").write_text(str(agent_of(first)))
        second = start("b", "a")
        assert agent_of(second) != agent_of(first)
        first.end()


def test_an_agent_that_is_kept_serves_a_group_that_comes_a_moment_later(start: Start) -> None:
    first = start("a")
    agent = agent_of(first)
    first.end(keep_agent=True)
    try:
        assert agent_of(start("b", "a")) == agent
    finally:
        os.kill(agent, signal.SIGKILL)


def test_an_agent_that_has_ended_is_replaced(start: Start) -> None:
    first = start("a")
    first.end()
    assert wait_until_gone([agent_of(first)]) == []

    second = start("b", "a")

    assert is_alive(agent_of(second))


@pytest.mark.parametrize(
    ("assigned", "variable", "visible"),
    [
        (None, "4,5", ("4", "5")),
        (None, None, None),
        (["2", "3"], None, ("2", "3")),
        (["2"], "2", ("2",)),
    ],
)
def test_ranks_see_the_gpus_that_the_engine_has_assigned(
    monkeypatch: pytest.MonkeyPatch, assigned: list[str] | None, variable: str | None, visible: tuple[str, ...] | None
) -> None:
    """Also where it sets no variable, as Ray does if it is told so: without one, all GPUs of the node are to be seen."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    node = object.__new__(relay.Relay)
    node._gpus = assigned
    asked = encode(m.OpenWorkerGroup(group="c1", size=2, gpus=True, visible=("0",)), 0)

    given, _ = decode_frame(node._localized(asked))
    assert isinstance(given, m.OpenWorkerGroup)
    assert given.visible == visible


def test_a_node_knows_which_segments_it_lacks_and_closes_what_it_drops() -> None:
    stored = StoredSegments()
    one, two = (os.memfd_create("test") for _ in range(2))
    stored.add("a", one)
    stored.add("b", two)
    assert stored.of(["b", "a"]) == [two, one]
    assert stored.of(["a", "c"]) is None
    stored.drop(["a", "never there"])
    assert stored.of(["a"]) is None
    assert stored.of(["b"]) == [two]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(one)
    stored.drop_all()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(two)


def test_a_folder_for_which_a_host_has_no_inode_is_named_with_what_to_look_at(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: str, *, exist_ok: bool) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    monkeypatch.setattr(os, "makedirs", full)
    cell, inputs = m.Cell(source="", filename="cell"), m.Parcel(data=b"", sizes=())
    setting = m.Setting(directory="/notebook")
    command = m.Execute(group="c", run="r", ranks=(0,), setting=setting, cell=cell, inputs=inputs)
    with pytest.raises(PoolError) as caught:
        relay.ProjectCopy(folder).locate(command)
    assert str(caught.value) == (
        f"the folder {folder}/0 cannot be made (No space left on device, of bytes or of inodes: see `df -h` and `df -i`)."
    )


def test_files_that_ranks_write_into_the_copy_are_told_once_each_until_they_are_brought_again(folder: Path) -> None:
    copy = relay.ProjectCopy(folder)
    brought = (("0/helper.py", b"1"), ("0/data/a.csv", b"a"), ("1/package.py", b""))
    copy.update([(name, 10**18, False, content) for name, content in brought], [])
    assert copy.written() == []
    for name in ("model.pt", "data/a.csv", ".hidden", "__pycache__/helper.pyc", "runs/1/events"):
        (folder / "0" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "0" / name).write_bytes(b"new")
    (folder / "1" / "package.py").write_bytes(b"new")
    assert copy.written() == ["data/a.csv", "model.pt", "runs/1/events"]
    (folder / "0" / "model.pt").write_bytes(b"once more")
    assert copy.written() == []
    copy.update([("0/data/a.csv", 10**18, False, b"a")], ["0/helper.py"])
    assert copy.written() == []
    (folder / "0" / "data" / "a.csv").write_bytes(b"newer")
    (folder / "0" / "helper.py").write_bytes(b"2")
    assert copy.written() == ["data/a.csv", "helper.py"]


def test_files_that_are_lost_with_the_ranks_are_named_in_one_sentence(
    folder: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.node", lambda: "host1")
    one = start("one")
    one.bring([], [])
    (folder / "one" / "project" / "0").mkdir(parents=True)
    for name in ("a\nb.pt", "c.pt"):
        (folder / "one" / "project" / "0" / name).touch()
    one._note_written_files(encode(m.Ended(run="r", at_s=0.0)))
    told, _ = decode_frame(opened(one.receive())[1][0][0])
    assert told == m.Noted(
        run="r",
        rank=None,
        text="a?b.pt and 1 other file were written on host1, into a copy of the notebook's folder that is removed with "
        "the ranks: write them to a path that the notebook's machine shares, or return them as the cell's value.",
    )
